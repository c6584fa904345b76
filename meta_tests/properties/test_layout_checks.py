"""Every row of the tables of packed and of paged attention can fail, and views are what they say they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from properties.checks import views
from properties.judge.verdict import Verdict
from properties.ops.layouts.inputs import layout_input
from properties.ops.layouts.relations import alone, of_sequence
from properties.ops.layouts.table import PAGED_PROPERTIES, VARLEN_PROPERTIES
from properties.property import Property
from properties.search import hunt, judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling import frameworks
from targets.calling.target import target_from
from targets.honest import layouts
from targets.honest.describe import CONVENTIONS

Tensor = torch.Tensor
Change = Callable[..., Any]
TABLES = {"attention_varlen": VARLEN_PROPERTIES, "attention_paged": PAGED_PROPERTIES}
HONEST = {"attention_varlen": layouts.attention_varlen, "attention_paged": layouts.attention_paged}
PROFILE = replace(PROFILES["quick"], examples=6, shrink_seconds=0.0, large=256)


def subject_of(function: Callable[..., Any], op: str, dtype: str = "fp32") -> Subject:
    return subject_for(target_from(function, spec="small", op=op), dtype, profile=PROFILE)


def changed(op: str, change: Change) -> Callable[..., Any]:
    """The honest kernel with ``change(out, lse, arguments)`` as its result."""
    if op == "attention_varlen":

        def varlen(
            q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, scale: float | None = None,
            is_causal: bool = False, alibi_slopes: Any = None, sinks: Any = None, return_lse: bool = False,
        ) -> Any:  # fmt: skip
            given = {"scale": scale, "is_causal": is_causal, "alibi_slopes": alibi_slopes, "sinks": sinks}
            out, lse = HONEST[op](q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **given)
            result = change(out, lse, {"q": q, "k": k, "v": v, "lengths": cu_seqlens_k.diff(), **given})
            return result if return_lse else result[0]

        varlen.__attn_oracle__ = {"conventions": dict(CONVENTIONS[op])}  # type: ignore[attr-defined]
        return varlen

    def paged(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, *,
        scale: float | None = None, is_causal: bool = False, alibi_slopes: Any = None, sinks: Any = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        given = {"scale": scale, "is_causal": is_causal, "alibi_slopes": alibi_slopes, "sinks": sinks}
        out, lse = HONEST[op](q, k_cache, v_cache, block_table, cache_seqlens, return_lse=True, **given)
        result = change(out, lse, {"q": q, "k": k_cache, "v": v_cache, "lengths": cache_seqlens, **given})
        return result if return_lse else result[0]

    paged.__attn_oracle__ = {"conventions": dict(CONVENTIONS[op])}  # type: ignore[attr-defined]
    return paged


def rows_with_one_query(out: Tensor, lse: Tensor, a: dict[str, Any]) -> Any:
    return (out * 1.01 if a["q"].shape[2] == 1 else out), lse


def in_place(out: Tensor, lse: Tensor, a: dict[str, Any]) -> Any:
    a["k"].zero_()
    return out, lse


def strided(out: Tensor, lse: Tensor, a: dict[str, Any]) -> Any:
    """Noticeable for tensors that are not contiguous."""
    return (out if a["k"].is_contiguous() and a["q"].is_contiguous() else out + 1e-2), lse


def by_page(out: Tensor, lse: Tensor, a: dict[str, Any]) -> Any:
    return out + 1e-6 * float(a["k"].shape[0]), lse


WRONG: dict[str, Change] = {
    "P1": lambda out, lse, a: (out * 1.01, lse),
    "P2": lambda out, lse, a: (out + 0 * a["k"].sum(), lse),
    "P3": lambda out, lse, a: (torch.where(lse.isneginf()[..., None] if out.ndim == 4 else lse.T.isneginf()[..., None],
                                           1.0, out), lse),
    "P7": lambda out, lse, a: (out, lse * 1.001),
    "P8": lambda out, lse, a: (out, lse * 1.001),
    "P9": lambda out, lse, a: (torch.where(lse.abs().max() > 200, torch.nan, out), lse),
    "P10": rows_with_one_query,
    "P11": lambda out, lse, a: (out + 1e-3 * len(a["lengths"]), lse),
    "P12": strided,
    "P13": lambda out, lse, a: (out * (1 + 1e-3 * a["q"].shape[1]), lse),
    "P15": in_place,
    "P17": lambda out, lse, a: (out if a["scale"] is None else out * 1.01, lse),
    "P18": lambda out, lse, a: (out * (1.01 if int(a["lengths"].max()) == 33 else 1.0), lse),
    "P23": lambda out, lse, a: (out.double(), lse),
    "G3": lambda out, lse, a: ((out.view(torch.int32) & -256).view(torch.float32), lse),
}  # fmt: skip


def rows() -> list[Any]:
    return [
        pytest.param(op, row, id=f"{op}-{row.id}-{row.title[:20]}") for op, table in TABLES.items() for row in table
    ]


@pytest.mark.parametrize(("op", "row"), rows())
def test_a_wrong_kernel_fails(op: str, row: Property) -> None:
    change = by_page if "where pages lie" in row.title else WRONG[row.id]
    found = hunt(subject_of(changed(op, change), op), row)
    assert Verdict.FAIL.value in {r.verdict for r in found}, [r.detail for r in found][:3]


@pytest.mark.parametrize(("op", "row"), rows())
def test_an_honest_kernel_lives(op: str, row: Property) -> None:
    found = hunt(subject_of(changed(op, lambda out, lse, a: (out, lse)), op), row)
    legal = {Verdict.PASS.value, Verdict.EXEMPT.value, Verdict.VACUOUS.value}
    assert {r.verdict for r in found} <= legal, [r.detail for r in found if r.verdict not in legal][:3]
    assert Verdict.PASS.value in {r.verdict for r in found}


@pytest.mark.parametrize("op", TABLES)
def test_a_sequence_alone_is_its_part_of_the_call(op: str) -> None:
    subject = subject_of(HONEST[op], op)
    case = layout_input(subject, [(2, 5), (2, 20), (2, 0)], kv_heads=2).case
    whole = subject.call(case).outputs
    for n in range(3):
        part, single = of_sequence(case, whole, n), subject.call(alone(case, n)).outputs
        assert {name: a.shape for name, a in part.items()} == {name: a.shape for name, a in single.items()}
        assert all(np.array_equal(part[name], single[name], equal_nan=True) for name in part)


@pytest.mark.parametrize("op", TABLES)
def test_a_declared_invariance_is_held_to_the_bit(op: str) -> None:
    """A last bit that follows the batch lives, is told, and dies where invariance is declared."""

    def nudged(out: Tensor, lse: Tensor, a: dict[str, Any]) -> Any:
        return torch.nextafter(out, out + (len(a["lengths"]) > 1)), lse

    row = next(row for row in TABLES[op] if row.id == "P11")
    function = changed(op, nudged)
    subject = subject_of(function, op)
    given = layout_input(subject, [(2, 5), (2, 9)])
    lives = judge(subject, row, given)
    assert (lives.verdict, lives.metrics["batch_invariant"]) == (Verdict.PASS, 0.0)
    assert "not batch-invariant" in lives.detail
    held = replace(subject, conventions={**subject.conventions, "batch_invariant": "yes"})
    assert judge(held, row, given).verdict is Verdict.FAIL


LAYS: dict[str, tuple[views.Lay, tuple[int, ...]]] = {
    "swapped": (views.swapped(1, 2), (60, 4, 12, 1)),
    "widened": (views.widened, (180, 60, 12, 1)),
    "every other": (views.every_other(2), (120, 40, 8, 1)),
    "offset": (views.offset, (60, 20, 4, 1)),
    "features first": (views.swapped(2, 3), (60, 20, 1, 5)),
    "expanded": (views.expanded(0), (0, 20, 4, 1)),
}


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("name", LAYS)
def test_views_hold_the_same_numbers_at_other_strides(name: str, framework: str) -> None:
    lay, strides = LAYS[name]
    array = np.broadcast_to(np.arange(60, dtype=np.float32).reshape(1, 3, 5, 4), (2, 3, 5, 4)).copy()
    bridge = frameworks.bridge(framework)
    view = lay(bridge, array, "cpu")
    assert np.array_equal(bridge.to_numpy(view), array)
    assert tuple(view.stride() if framework == "torch" else (s // 4 for s in view.strides)) == strides
    # What cannot be laid so stays as it is.
    assert np.array_equal(bridge.to_numpy(lay(bridge, np.ones(3, dtype=np.float32), "cpu")), np.ones(3))


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_far_apart_is_beyond_32_bits(framework: str) -> None:
    bridge = frameworks.bridge(framework)
    array = np.arange(12, dtype=np.float16).reshape(1, 1, 3, 4)
    view = views.far_apart(2)(bridge, array, "cpu")
    assert np.array_equal(bridge.to_numpy(view), array)
    step = view.stride(2) if framework == "torch" else view.strides[2] // 2
    assert 2 * step >= 2**31
    with pytest.raises(ValueError, match="axes before 2 must have length 1"):
        views.far_apart(2)(bridge, array.reshape(1, 3, 2, 2), "cpu")


def test_a_refused_view_is_told_and_no_failure() -> None:
    def refusing(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if not all(t.is_contiguous() for t in (q, k, v)):
            raise ValueError("contiguous tensors, please")
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    from properties.inputs.strategies import attention_input
    from properties.ops.attention.table import PROPERTIES

    subject = subject_for(target_from(refusing, spec="small"), "fp32", profile=PROFILE)
    row = next(row for row in PROPERTIES if row.id == "P12")
    judged = judge(subject, row, attention_input(subject, batch=2, kv_heads=2, sq=3, sk=5))
    assert judged.verdict is Verdict.PASS
    assert "refused: ValueError: contiguous tensors, please" in judged.detail
