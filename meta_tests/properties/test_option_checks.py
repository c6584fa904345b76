"""What the checks of attention's options, batches and steps see beyond what mutants show, and what they let pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from properties.inputs.recipes import Logits, Mask
from properties.inputs.strategies import attention_input
from properties.judge.empty_rows import empty_rows
from properties.judge.verdict import Verdict
from properties.ops.attention import options, relations
from properties.ops.attention.merge import split_merge
from properties.ops.attention.table import PROPERTIES
from properties.property import Property
from properties.search import judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import target_from
from targets.honest import flash, flash_variants
from targets.mutants.table import mutant_named
from targets.probing.probes import probe

Tensor = torch.Tensor


def subject_of(function: Any, dtype: str = "fp32") -> Subject:
    target = target_from(function, spec="small", op="attention")
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILES["quick"])


def row(id: str) -> Property:
    return next(p for p in PROPERTIES if p.id == id)


@pytest.mark.parametrize("sink", [0.5, 8.0, -8.0])
@pytest.mark.parametrize("function", [flash.attention, flash_variants.other_options, flash_variants.exp2_domain])
def test_a_sink_is_counted_by_one_part(function: Any, sink: float) -> None:
    """Whether the LSE includes it or not, and where a part sees nothing but the sink."""
    subject = subject_of(function)
    for mask in (None, Mask("bool", "first"), Mask("bool", "last")):
        given = attention_input(subject, kv_heads=2, sq=3, sk=40, mask=mask, extras={"sinks": sink})
        assert split_merge(subject, given).verdict is Verdict.PASS
        assert judge(subject, row("P7"), given).verdict is Verdict.PASS


def test_an_lse_that_lacks_the_sink_is_no_merge() -> None:
    function = resolve(mutant_named("lse_without_sink").target).function
    subject = subject_of(function)
    given = attention_input(subject, sq=3, sk=40, extras={"sinks": 3.0})
    assert split_merge(subject, given).verdict is Verdict.FAIL


def only_a_sink(lse: float) -> Any:
    """The honest kernel, with this LSE where a row sees no key."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any = None, sinks: Any = None, return_lse: bool = False
    ) -> Any:
        out, log = flash.attention(q, k, v, attn_mask=attn_mask, sinks=sinks, return_lse=True)
        blind = ~attn_mask.expand(*q.shape[:3], k.shape[2]).any(-1)
        return (out, torch.where(blind, lse, log)) if return_lse else out

    return attention


@pytest.mark.parametrize(("lse", "verdict"), [(1.0, Verdict.PASS), (-np.inf, Verdict.FAIL), (1.001, Verdict.FAIL)])
def test_a_row_with_nothing_but_a_sink_has_its_logit(lse: float, verdict: Verdict) -> None:
    subject = subject_of(flash.attention)
    wrong = replace(subject, target=target_from(only_a_sink(lse), spec="small", op="attention"))
    given = attention_input(wrong, sq=5, sk=7, mask=Mask("bool", "rows"), extras={"sinks": 1.0})
    assert judge(wrong, row("P3"), given).verdict is verdict


def test_an_empty_row_follows_its_convention_where_there_is_no_sink() -> None:
    from oracle.evaluate import enclose

    subject = subject_of(flash.attention)
    case = attention_input(subject, sq=5, sk=7, mask=Mask("bool", "rows")).case
    block = enclose(case)[0]
    rows = len(block.rows)
    ones = {"out": np.ones((rows, 16), dtype=np.float32), "lse": np.full((rows, 1), -np.inf, dtype=np.float32)}
    assert "value of an empty row is not zero" in empty_rows(subject, case, block, ones)
    zeros = {**ones, "out": 0 * ones["out"]}
    assert empty_rows(subject, case, block, zeros) == ""
    assert "LSE of an empty row is not -inf" in empty_rows(
        subject, case, block, {**zeros, "lse": 0 * ones["out"][:, :1]}
    )


def test_ends_of_a_window_are_watched() -> None:
    subject = subject_of(flash.attention)
    for sq, window, ends in ((1, (3, 0), {5, 6}), (10, (2, 1), None)):
        case = attention_input(subject, sq=sq, sk=10, extras={"window_size": window}).case
        visible = relations.visible_rows(case)
        watched = relations.watched_keys(case, visible, 2)
        assert ends is None or ends <= set(watched)
        # A row's window ends between two of the watched keys.
        assert any(visible[0, 0, :, j].any() != visible[0, 0, :, i].all() for i in watched for j in watched)


def test_the_hull_of_values_includes_the_sink() -> None:
    subject = subject_of(flash.attention)
    given = attention_input(subject, sq=3, sk=9, extras={"sinks": 4.0})
    shifted = given.case.with_arrays(v=given.case.arrays["v"] + np.float32(10))
    assert relations.partition_of_unity(subject, replace(given, case=shifted)).verdict is Verdict.PASS


def test_options_are_those_of_the_target_and_mean_what_it_says() -> None:
    every = {"window_size": (3, 0), "softcap": 5.0, "alibi_slopes": "sequences", "sinks": 1.0}
    subject = subject_of(flash_variants.other_options, "bf16")
    made = options.option_values(subject, every, batch=2, heads=6)
    assert made["alibi_slopes"].shape == (2, 6)
    assert made["alibi_slopes"].dtype == np.float32
    assert len(np.unique(made["alibi_slopes"])) == 12
    assert made["sinks"].dtype == subject.fmt.dtype
    assert len(np.unique(made["sinks"].astype(np.float64))) == 6
    said = {"window_left": "excluded", "softcap_order": "after_mask", "alibi_bias": "key_index", "lse_sink": "excluded"}
    assert {name: made[name] for name in said} == said

    def plain(q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None = None) -> Any:
        return flash.attention(q, k, v, softcap=softcap)

    assert set(options.option_values(subject_of(plain), every, batch=2, heads=6)) == {"softcap"}
    assert options.held(subject_of(plain)) == ["softcap"]


def test_each_option_is_drawn_in_part_of_the_cases() -> None:
    import hypothesis
    from hypothesis import strategies as st

    subject, seen = subject_of(flash.attention), []

    # How long a draw takes on a busy machine is not the question.
    patient = [hypothesis.HealthCheck.too_slow]

    @hypothesis.settings(
        max_examples=150, database=None, derandomize=True, deadline=None, suppress_health_check=patient
    )
    @hypothesis.given(st.data())
    def drawn(data: Any) -> None:
        seen.append(options.drawn(data.draw, subject, options.NAMES))
        assert options.drawn(data.draw, subject, options.NAMES, one=True) != options.NONE
        assert set(options.facts(options.drawn(data.draw, subject, ("softcap",)))) <= {"softcap"}

    drawn()
    for field in ("window", "softcap", "alibi", "sink"):
        share = np.mean([field in options.facts(extras) for extras in seen])
        assert 0.1 < share < 0.7, field


def test_steps_differ_from_all_at_once_where_one_query_is_another_kernel() -> None:
    def other_scale(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, return_lse: bool = False) -> Any:
        scale = 0.26 if q.shape[2] == 1 else 0.25
        return flash.attention(q, k, v, scale=scale, is_causal=is_causal, return_lse=return_lse)

    for function, verdict in ((other_scale, Verdict.FAIL), (flash.attention, Verdict.PASS)):
        subject = subject_of(function)
        given = attention_input(subject, sq=6, sk=6, is_causal=True, logits=Logits("ascending", 3.0))
        assert judge(subject, row("P10"), given).verdict is verdict


def test_splits_that_lose_a_key_differ() -> None:
    def losing(q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 1) -> Any:
        keys = k.shape[2] // num_splits * num_splits
        return flash.attention(q, k[:, :, :keys], v[:, :, :keys])

    for function, verdict in ((losing, Verdict.FAIL), (flash_variants.splits_as_asked, Verdict.PASS)):
        subject = subject_of(function)
        assert judge(subject, row("P11"), attention_input(subject, batch=3, sq=2, sk=37)).verdict is verdict
