"""What attention's checks see that no mutant shows, what they must let pass, and what its masks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle.case import Case
from oracle.formats import FORMATS
from properties.inputs.recipes import EMPTYING, HIDES, OVER, Mask, mask_array
from properties.inputs.strategies import attention_input
from properties.judge.pipeline import certify
from properties.judge.verdict import Judgement, Verdict
from properties.ops.attention import relations
from properties.ops.attention.merge import split_merge
from properties.ops.attention.table import PROPERTIES
from properties.search import judge
from properties.subject import PROFILES, Input, Subject, subject_for
from targets.calling.target import run, target_from
from targets.honest import flash
from targets.honest.describe import describe

Tensor = torch.Tensor


def subject_of(function: Callable[..., Any], dtype: str = "fp32", **conventions: str) -> Subject:
    target = target_from(function, spec="small", op="attention")
    return subject_for(target, dtype, conventions=conventions, profile=PROFILES["quick"])


def on(subject: Subject, id: str, given: Input) -> Judgement:
    return judge(subject, next(row for row in PROPERTIES if row.id == id), given)


def changed(change: Callable[..., Any]) -> Callable[..., Any]:
    """The honest kernel, its (out, lse) passed on to ``change`` together with the inputs."""

    @describe("attention")
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        given = {"scale": scale, "is_causal": is_causal, "attn_mask": attn_mask}
        out, lse = flash.attention(q, k, v, return_lse=True, **given)
        result = change(out, lse, q, k, v)
        return result if return_lse else result[0]

    return attention


def all_keys_lse(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return out, torch.logsumexp(q @ k.mT / q.shape[-1] ** 0.5, -1)


@pytest.mark.parametrize("id", ["P2", "P4"])
def test_an_lse_that_hidden_keys_enter(id: str) -> None:
    subject = subject_of(changed(all_keys_lse))
    judged = on(subject, id, attention_input(subject, sq=4, sk=4, is_causal=True))
    assert judged.verdict is Verdict.FAIL
    assert judged.worst["output"] == "lse"


def other_heads_in(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Every head gets a little of the one before."""
    return out + 1e-3 * out.roll(1, dims=1), lse


def test_a_head_that_knows_of_the_others() -> None:
    subject = subject_of(changed(other_heads_in))
    judged = on(subject, "P13", attention_input(subject, kv_heads=3, sq=2, sk=5))
    assert judged.verdict is Verdict.FAIL
    assert "alone" in judged.detail
    alone = attention_input(subject, kv_heads=1, sq=2, sk=5)
    assert on(subject_of(flash.attention), "P13", alone).verdict is Verdict.PASS


def test_an_answer_that_belongs_to_an_earlier_call() -> None:
    kept: dict[Any, Any] = {}
    subject = subject_of(changed(lambda out, lse, q, k, v: kept.setdefault(q.shape, (out, lse))))
    judged = on(subject, "P15", attention_input(subject, sq=3, sk=5))
    assert judged.verdict is Verdict.FAIL
    assert "after one of the same shapes" in judged.detail


def test_a_sequence_that_depends_on_its_batch() -> None:
    subject = subject_of(changed(lambda out, lse, q, k, v: (out + 1e-3 * (len(q) - 1), lse)))
    assert on(subject, "P15", attention_input(subject, sq=3, sk=5)).verdict is Verdict.FAIL


@pytest.mark.parametrize(("name", "position"), [("q", "before"), ("v", "behind")])
def test_a_write_next_to_an_input_is_named(name: str, position: str) -> None:
    def writing(q: Tensor, k: Tensor, v: Tensor) -> Any:
        tensor = {"q": q, "v": v}[name]
        start = tensor.storage_offset()
        if start:
            tensor.as_strided((1,), (1,), start - 1 if position == "before" else start + tensor.numel()).zero_()
        return flash.attention(q, k, v)

    subject = subject_of(writing)
    given = attention_input(subject, sq=3, sk=5)
    judged = on(subject, "P15", given)
    assert judged.verdict is Verdict.FAIL
    assert judged.detail == f"overrun: memory next to {name} was written"


def test_memory_behind_v_that_meets_a_zero_weight() -> None:
    """A last tile loaded whole, as reported for unused slots of a cache (Dao-AILab/flash-attention#2374): 0 * NaN."""

    def reading(q: Tensor, k: Tensor, v: Tensor) -> Any:
        end = v.storage_offset() + v.numel()
        room = v.untyped_storage().nbytes() // v.element_size() - end
        behind = v.as_strided((min(room, 8),), (1,), end)
        return flash.attention(q, k, v) + (0.0 * behind).sum()

    subject = subject_of(reading)
    given = attention_input(subject, sq=3, sk=5)
    assert certify(subject, given.case).verdict is Verdict.PASS
    judged = on(subject, "P15", given)
    assert judged.verdict is Verdict.FAIL
    assert "memory next to the inputs" in judged.detail


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_guard_bytes_change_nothing_else(dtype: str) -> None:
    subject = subject_of(flash.attention, dtype)
    given = attention_input(subject, batch=2, kv_heads=2, sq=3, sk=5, mask=Mask("additive"))
    observed = run(subject.target, given.case, guarded=True)
    assert observed.fault is None
    plain = subject.call(given.case).outputs
    assert all(observed.outputs[name].tobytes() == plain[name].tobytes() for name in plain)


def with_empty_lse(value: float) -> Callable[..., Any]:
    return changed(lambda out, lse, *_: (out, torch.where(lse == -torch.inf, value, lse)))


@pytest.mark.parametrize(("value", "stated"), [(torch.inf, "+inf"), (0.0, "finite"), (-torch.inf, "-inf")])
def test_a_merge_honours_the_convention_of_empty_parts(value: float, stated: str) -> None:
    kernel = with_empty_lse(value)
    for convention in ("-inf", stated):
        subject = subject_of(kernel, empty_row_lse=convention)
        given = attention_input(subject, sq=3, sk=40, mask=Mask("bool", "first"))
        verdict = Verdict.PASS if convention == stated else Verdict.FAIL
        assert split_merge(subject, given).verdict is verdict


@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (3, 40), (40, 3), (33, 65)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_a_causal_case_is_split_where_its_parts_can_be_asked_for(sq: int, sk: int, alignment: str) -> None:
    """With a mask always; without, where a causal or an unmasked call sees the same keys."""

    def shifted(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, return_lse: bool = False) -> Any:
        rows, keys = q.shape[-2], k.shape[-2]
        shift = keys - rows if alignment == "bottom_right" else 0
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(shift) if is_causal else None
        return flash.attention(q, k, v, attn_mask=mask, return_lse=return_lse)

    bare = subject_of(shifted, causal_alignment=alignment, empty_row_lse="-inf")
    given = attention_input(bare, sq=sq, sk=sk, is_causal=True)
    parts = list(relations_of(bare, given.case))
    expected = alignment == "bottom_right" and sk - sq + 1 >= max(1, sk // 3)
    assert bool(parts) == expected
    assert split_merge(bare, given).verdict in (Verdict.PASS, Verdict.UNSUPPORTED)
    if alignment == "bottom_right":
        masked = subject_of(flash.attention, causal_alignment=alignment, empty_row_lse="-inf")
        assert split_merge(masked, given).verdict is Verdict.PASS


def relations_of(subject: Subject, case: Case) -> Any:
    from properties.ops.attention.merge import _parts

    return _parts(subject, case, max(1, case.arrays["k"].shape[2] // 3))


def test_exact_arithmetic_lets_unequal_splits_merge_and_no_poor_division_pass() -> None:
    three = flash.kernel(flash.Steps(splits=3), contract={"preset": "flash", "splits": 3})
    row = next(row for row in PROPERTIES if row.id == "P28")
    for function, broken in ((three, False), (changed(lambda out, lse, *_: (out * 1.00002, lse)), True)):
        subject = subject_of(function)
        judged = {judge(subject, row, edge).verdict for edge in row.edges(subject)}
        assert (Verdict.FAIL in judged) == broken


@pytest.mark.parametrize("shift", relations.SHIFTS)
def test_opposite_powers_of_two_stay_normal_or_are_left_out(shift: int) -> None:
    fmt = FORMATS["fp16"]
    subject = subject_of(flash.attention, "fp16")
    q = np.array([1.0, -3.0, 0.0, 2.0**-11]).reshape(1, 1, 1, 4)
    case = attention_input(subject, sq=1, sk=1, dims=4).case
    case = case.with_arrays(q=fmt.store(q), k=fmt.store(np.full((1, 1, 1, 4), 4.0)))
    moved = relations._scaled_oppositely(case, shift, fmt)
    # 2^-11 / sqrt(4) is 2^-12, and the smallest normal number 2^-14.
    assert (moved is None) == (shift < -2)
    if moved is not None:
        assert np.array_equal(moved.arrays["q"].astype(np.float64), np.ldexp(q, shift))


SHAPE = (2, 3, 7, 40)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("hides", HIDES)
def test_masks(hides: str, over: str) -> None:
    """Of the shape that ``over`` says; keys for every row unless the way of hiding empties some; both kinds alike."""
    fmt = FORMATS["bf16"]
    keep = mask_array(Mask("bool", hides, over), 3, SHAPE, fmt)
    shapes = {"rows": SHAPE[2:], "keys": (2, 1, 1, 40), "sequences": (2, 1, 7, 40), "heads": SHAPE}
    assert keep.shape == shapes[over]
    assert keep.dtype == np.bool_
    sees = np.broadcast_to(keep, SHAPE).any(axis=-1)
    assert sees.all() or hides in EMPTYING
    assert not keep.all()
    added = mask_array(Mask("additive", hides, over), 3, SHAPE, fmt)
    assert added.dtype == fmt.dtype
    assert np.array_equal(np.isneginf(added.astype(np.float64)), ~keep)


def test_masks_do_what_their_names_say() -> None:
    fmt = FORMATS["fp32"]

    def of(hides: str) -> Any:
        return mask_array(Mask("bool", hides, "rows"), 3, (1, 1, 7, 150), fmt)

    assert not of("first")[:, :64].any()
    assert not of("last")[:, 80:].any()
    assert (of("all but one").sum(axis=-1) == 1).all()
    assert (of("far").sum(axis=-1) <= 11).all()
    assert of("rows").any(axis=-1).tolist() == [True, False, True, True, False, True, True]
    assert not of("all").any()


def test_watched_keys_are_those_that_some_rows_see_and_some_do_not() -> None:
    subject = subject_of(flash.attention)
    case = attention_input(subject, sq=4, sk=6, is_causal=True).case
    case = case.with_options(causal_alignment="bottom_right")
    visible = relations.visible_rows(case)
    assert sorted(relations.watched_keys(case, visible, 9)) == [3, 4, 5]
    assert relations.watched_keys(case, visible, 2) == [5, 3]
    everywhere = np.ones_like(visible)
    assert relations.watched_keys(case, everywhere, 3) == [5]


def test_the_edges_leave_out_what_a_target_has_no_option_for() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash.attention(q, k, v)

    subject = subject_of(plain)
    few = replace(subject, profile=replace(subject.profile, large=64))
    for row in PROPERTIES:
        assert all(set(edge.case.options) == set() for edge in row.edges(few))
