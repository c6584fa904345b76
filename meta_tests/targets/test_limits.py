"""Limits: inputs that a target may refuse are found, told, and neither failed nor counted as passed."""

from typing import Any

import numpy as np
import pytest
import torch

from oracle.case import Case
from oracle.ops.attention.limits import LIMITS
from oracle.ops.table import ops
from properties.fit import beyond
from properties.inputs.recipes import KINDS_OF_MASKS, OVER, Mask
from properties.inputs.strategies import attention_input, taken
from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.search import judge
from properties.subject import subject_for
from targets.calling.target import Target, target_from
from targets.probing.probes import probe

ROW = ops()["attention"]


def case(*, heads: int = 2, kv_heads: int = 2, value_dims: int = 4, **options: Any) -> Case:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, heads, 3, 4), "k": (2, kv_heads, 5, 4), "v": (2, kv_heads, 5, value_dims)}
    return Case("attention", {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, options)


def hidden(*shape: int, dtype: Any = bool) -> Any:
    return np.zeros(shape, dtype=dtype)


BEYOND = {
    "grouped_heads": case(heads=4),
    "unequal_value_dim": case(value_dims=8),
    "boolean_mask": case(attn_mask=hidden(2, 2, 3, 5)),
    "additive_mask": case(attn_mask=hidden(2, 2, 3, 5, dtype=np.float32)),
    "mask_of_rows": case(attn_mask=hidden(3, 5)),
    "mask_of_keys": case(attn_mask=hidden(2, 1, 1, 5)),
    "mask_of_sequences": case(attn_mask=hidden(2, 1, 3, 5)),
    "mask_of_heads": case(attn_mask=hidden(2, 2, 3, 5)),
    "slopes_by_head": case(alibi_slopes=np.ones(2, np.float32)),
    "slopes_by_sequence": case(alibi_slopes=np.ones((2, 2), np.float32)),
}


def test_every_limit_has_its_cases_and_no_other() -> None:
    assert set(BEYOND) == set(LIMITS)
    for name, beyond_it in BEYOND.items():
        assert ROW.refused(beyond_it, {name: "refused"}) == LIMITS[name].said
        assert ROW.refused(beyond_it, {name: "accepted"}) == ROW.refused(beyond_it, {}) == ""
        assert ROW.refused(case(), {name: "refused"}) == ""


def several_heads(q: Any, k: Any, v: Any) -> Any:
    """Plain multi-head code: one KV head broadcasts, two do not."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def one_shape_of_slopes(q: Any, k: Any, v: Any, alibi_slopes: Any = None) -> Any:
    """Slopes [B, Hq] give an output of five dimensions."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if alibi_slopes is not None:
        apart = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        scores = scores - alibi_slopes[None, :, None, None] * apart.abs()
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("function", "limit"), [(several_heads, "grouped_heads"), (one_shape_of_slopes, "slopes_by_sequence")]
)
def test_a_probe_is_not_fooled(function: Any, limit: str) -> None:
    target = target_from(function, spec="f")
    found = probe(target, "fp32")
    assert found[limit] == "refused"
    assert f"the target refuses {LIMITS[limit].said}" in beyond(ROW, found)


def test_a_wrong_shape_of_an_ordinary_input_is_a_fault_and_no_limit() -> None:
    def narrow(q: Any, k: Any, v: Any) -> Any:
        """Forgets that values may be wider than keys."""
        return several_heads(q, k, v)[..., : q.shape[-1]]

    target = target_from(narrow, spec="f")
    assert probe(target, "fp32")["unequal_value_dim"] == "accepted"
    subject = subject_for(target, "fp32")
    example = attention_input(subject, sq=3, sk=4, dims=16, value_dims=32)
    judged = judge(subject, next(p for p in properties_for("attention") if p.id == "P1"), example)
    assert judged.verdict is Verdict.FAIL and "expected [1, 1, 3, 32]" in judged.detail


@pytest.mark.parametrize(("kind", "leaks"), [("bool", False), ("additive", True)])
def test_a_nan_behind_a_mask_is_judged_by_what_is_stated_of_its_kind(kind: str, leaks: bool) -> None:
    def selects(q: Any, k: Any, v: Any, attn_mask: Any = None) -> Any:
        """A boolean mask selects, of scores and values; an additive one adds, so that -inf and NaN give NaN."""
        scores, values = q @ k.mT * q.shape[-1] ** -0.5, v
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -torch.inf)
            values = torch.nan_to_num(v)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return torch.softmax(scores, -1) @ values

    target = target_from(selects, spec="f")
    found = probe(target, "fp32")
    assert (found["masked_nan"], found["masked_nan_additive"]) == ("blocked", "leaks")
    prop = next(p for p in properties_for("attention") if p.id == "P2")
    honest, lying = (
        subject_for(target, "fp32", conventions=found | more) for more in ({}, {"masked_nan_additive": "blocked"})
    )
    mask = Mask(kind, "last", "heads")
    example = attention_input(honest, kv_heads=1, sq=3, sk=8, mask=mask)
    assert judge(honest, prop, example).verdict is Verdict.PASS
    assert (judge(lying, prop, example).verdict is Verdict.FAIL) is leaks


def test_what_is_refused_is_not_tested_and_not_failed() -> None:
    subject = subject_for(target_from(several_heads, spec="f"), "fp32", conventions={"grouped_heads": "refused"})
    example = attention_input(subject, kv_heads=2, group=2, sq=3, sk=4)
    prop = next(p for p in properties_for("attention") if p.id == "P1")
    judged = judge(subject, prop, example)
    assert (judged.verdict, judged.detail) == (Verdict.UNSUPPORTED, "the target refuses grouped KV heads")
    unlimited = subject_for(subject.target, "fp32", conventions={"grouped_heads": "accepted"})
    assert judge(unlimited, prop, example).verdict is Verdict.ERROR


@pytest.mark.parametrize("limit", [name for name, row in LIMITS.items() if row.option])
def test_what_is_drawn_has_a_form_that_the_target_takes(limit: str) -> None:
    def function(q: Any, k: Any, v: Any, attn_mask: Any = None, alibi_slopes: Any = None) -> Any:
        return v

    target: Target = target_from(function, spec="f")
    subject = subject_for(target, "fp32", conventions={limit: "refused"})
    for kind in KINDS_OF_MASKS:
        for over in OVER:
            for alibi in ("heads", "sequences"):
                made = attention_input(
                    subject,
                    batch=2,
                    kv_heads=2,
                    sq=3,
                    sk=4,
                    mask=Mask(kind, "some", over),
                    extras={"alibi_slopes": alibi},
                )
                assert ROW.refused(made.case, subject.conventions) == "", (kind, over, alibi)
                wanted = Mask(kind, "some", over)
                assert taken(subject_for(target, "fp32"), wanted) == wanted
