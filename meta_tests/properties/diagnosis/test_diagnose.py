"""Diagnoses name the defect of a mutant from its smallest failing case, and claim nothing where nothing explains it.

Mutants are the proving ground: their defect is known, and `LOOKS` says which words must name it. Kernels that only add
noise, that have two defects, or that are wrong at one input alone must get no "as if"; honest kernels no diagnosis.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.case import Case
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS
from properties import search
from properties.diagnosis import engine
from properties.diagnosis.counterfactual import FailingCase, Prediction, failing_case
from properties.diagnosis.engine import diagnose, fresh_numbers, table_of
from properties.diagnosis.match import match
from properties.diagnosis.where import pattern, where_wrong
from properties.judge.verdict import BAD, Verdict
from properties.message import failure_message
from properties.ops.rope.table import APPLY_PROPERTIES
from properties.ops.table import properties_for
from properties.property import Property, no_edges
from properties.record import Record
from properties.search import examine, hunt
from properties.subject import Profile, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import target_from
from targets.honest import flash
from targets.honest import rope as honest_rope
from targets.honest import softmax as honest_softmax
from targets.honest.table import HONEST
from targets.mutants.table import Mutant, mutant_named, mutants
from targets.probing.probes import probe
from targets.probing.tiny import tiny_case

PROFILE = Profile("test", 8, 0.3, 512)

# Mutant -> (dtype, words that the diagnosis of its smallest failing case must hold).
LOOKS: dict[str, tuple[str, str]] = {
    # Range.
    "finite_max_sentinel": ("bf16", "running maximum started at -50000"),
    "max_of_current_tile": ("fp32", "maximum of each tile of 16, 32 or 64 keys replaced the running one"),
    "scores_in_fp16": ("fp16", "scores not yet scaled were stored in fp16"),
    "scores_in_bf16": ("bf16", "scaled scores"),
    "split_merge_without_max": ("bf16", "without subtracting a maximum"),
    "zero_max_after_hidden_tile": ("bf16", "32 or 64 keys set the maximum to 0"),
    "lazy_rescaling_mixes_maxima": ("bf16", "the weights used a new maximum"),
    # Precision.
    "accumulator_in_fp16": ("fp32", "accumulator passed through fp16"),
    "accumulator_through_bf16": ("fp32", "accumulator passed through bf16"),
    "denominator_in_bf16": ("bf16", "row sum were kept in bf16"),
    "denominator_in_fp16": ("bf16", "row sum were kept in fp16"),
    "tf32_dots": ("fp32", "q and k were rounded to tf32"),
    "log2e_four_digits": ("bf16", "log2(e) were 1.442"),
    "gain_one_percent": ("fp32", "output were 1% too large"),
    "scaled_query_rounded": ("bf16", "q times the scale were rounded to the input's format"),
    "denominator_epsilon": ("fp32", "1e-05 were added to the row sum"),
    "query_on_fixed_grid": ("fp32", "q were rounded to multiples of 2^-8"),
    # Who sees what.
    "empty_row_nan": ("bf16", "an empty row divided 0 by 0"),
    "mask_as_finfo_min": ("bf16", "rows without a key attended to every key alike"),
    # The smallest case, as far as time lets it shrink, has a row without a key or one with a hidden key.
    "mask_minus_1e4": ("bf16", " add"),
    "mask_adds_minus_inf": ("bf16", "hidden keys had a number added to their scores (NaN stays NaN)"),
    "masked_value_leaks": ("bf16", "zero weight of a hidden key were multiplied by its NaN value"),
    "causal_top_left": ("bf16", "causal mask were aligned to the first key"),
    "causal_bottom_right": ("fp32", "were aligned to the last key"),
    "causal_sees_next_key": ("bf16", "causal mask let each query see one more key"),
    "causal_ignored": ("bf16", "is_causal were ignored"),
    "causal_dropped_on_full_tiles": ("bf16", "is_causal were ignored"),
    "causal_dropped_with_lse": ("fp32", "is_causal were ignored"),
    "mask_inverted": ("bf16", "the mask's True meant hidden"),
    "mask_read_as_length": ("bf16", "mask were read as a number of visible keys"),
    "mask_ignored_beyond_512": ("bf16", "mask were read for the first 512 keys only"),
    "mask_of_head_zero": ("bf16", "all heads used the mask of head 0"),
    "mask_offset_ignores_broadcast": ("bf16", "mask were read with one slice per head"),
    "first_tile_hidden_nan": ("bf16", "keys that is wholly hidden gave NaN"),
    # Indices and extents.
    "tail_keys_kept": ("bf16", "zeros that fill the last tile of 32 keys were attended to"),
    "last_key_of_full_tile_dropped": ("bf16", "last key of every full tile of 32 were missing"),
    "last_tile_dropped": ("bf16", "causal loop ended before the last, partial tile"),
    "last_odd_row_zeroed": ("bf16", "the last row were zeros"),
    "value_tiles_swapped": ("bf16", "had changed places"),
    "head_dim_beyond_64_ignored": ("bf16", "scores read the first 64 entries of a head only"),
    "value_dim_from_head_dim": ("bf16", "columns of the output from 16 on were zeros"),
    "gqa_tiled": ("bf16", "KV heads were tiled (h mod Hkv) instead of repeated"),
    "gqa_group_is_kv_heads": ("bf16", "number of KV heads were the size of a group"),
    # Scale, bias, LSE.
    "window_one_key_too_far": ("fp32", "window reached one key further to the left"),
    "window_one_key_short_in_decode": ("fp32", "window ended one key early on the left"),
    "window_without_right_end": ("fp32", "window had no right end"),
    "window_ignored": ("bf16", "window were ignored"),
    "window_ignored_in_decode": ("bf16", "window were ignored"),
    "softcap_ignored": ("bf16", "soft cap were ignored"),
    "softcap_after_mask": ("fp32", "soft cap were applied after bias and ALiBi"),
    "alibi_favours_far_keys": ("fp32", "ALiBi had the wrong sign"),
    "alibi_ignored": ("bf16", "ALiBi were ignored"),
    "slopes_of_head_zero": ("fp32", "all heads used the ALiBi slope of head 0"),
    "slopes_of_first_sequence": ("fp32", "all sequences used the ALiBi slopes of the first"),
    "sinks_ignored": ("bf16", "sink were ignored"),
    "sinks_of_head_zero": ("fp32", "all heads used the sink of head 0"),
    "sink_scaled": ("fp32", "sink were scaled as scores are"),
    "sink_in_every_split": ("fp32", "sink were counted 2 times"),
    "sink_dropped_with_window": ("fp32", "sink were ignored"),
    "lse_without_sink": ("fp32", "LSE left the sink out"),
    "scale_ignored": ("bf16", "the given scale were ignored"),
    "scale_one_by_default": ("fp32", "the scale were 1"),
    "scale_from_padded_dim": ("bf16", "the scale were made from D padded to 32"),
    "scale_twice_with_mask": ("bf16", "the scale were applied twice"),
    "bias_scaled": ("bf16", "the additive mask were scaled"),
    "lse_base_two": ("bf16", "the LSE were in base 2"),
    "lse_plus_inf": ("bf16", "the LSE of an empty row were inf"),
    # Rotary embedding.
    "rope_layout_ignored": ("bf16", "the layout were half"),
    "rope_layouts_swapped": ("bf16", "the layout were interleaved"),
    "rope_halves_exchanged": ("bf16", "entries of each pair were exchanged"),
    "rope_positions_in_bf16": ("fp32", "positions were rounded to bf16"),
    "rope_positions_in_fp16": ("fp32", "positions were rounded to fp16"),
    "rope_frequencies_in_bf16": ("fp32", "frequencies were rounded to bf16"),
    "rope_table_in_input_dtype": ("bf16", "cos and sin were stored in bf16"),
    "rope_table_too_short": ("bf16", "read the last row of a table of 4096"),
    "rope_exponent_of_pair": ("bf16", "exponents were i/d instead of 2i/d"),
    "rope_sine_negated": ("bf16", "the sign of sin were flipped"),
    "rope_base_10050": ("fp32", "the base were about 10050"),
    "rope_base_ignored": ("bf16", "base were ignored"),
    "rope_rotates_everything": ("bf16", "rotary_dim were ignored"),
    "rope_exponent_of_head_dim": ("bf16", "exponents were 2i/D instead of 2i/rotary_dim"),
    "rope_partial_twice": ("bf16", "rotated fraction were applied twice"),
    "rope_positions_restart": ("bf16", "positions counted from 0 in each call"),
    "rope_positions_of_first_sequence": ("bf16", "all sequences used the positions of the first"),
    "rope_magnitude_ignored": ("bf16", "the magnitude were left out"),
    "rope_magnitude_squared": ("bf16", "the magnitude counted twice"),
    "rope_attention_factor_ignored": ("bf16", "attention_factor were ignored"),
    "rope_linear_multiplies": ("bf16", "positions were multiplied by the factor"),
    # At factor 1, the simplest, the base never grows.
    "rope_dynamic_constant": ("bf16", "scaling were ignored"),
    "rope_ramp_always_truncated": ("bf16", "truncate were True"),
    "rope_longrope_short_always": ("bf16", "the short factors were used"),
    "rope_longrope_long_always": ("bf16", "the long factors were used"),
    "rope_longrope_one_early": ("bf16", "the long factors were used"),
    "rope_sections_swapped": ("bf16", "height and width had changed places"),
    "rope_sections_never_interleaved": ("fp32", "the sections were runs"),
    "rope_apply_truncates": ("bf16", "output were truncated instead of rounded"),
    # Softmax.
    "softmax_without_max": ("bf16", "without subtracting a maximum"),
    "softmax_sum_in_bf16": ("fp16", "row sum were kept in bf16"),
    "softmax_in_input_dtype": ("fp16", "every stage were rounded to fp16"),
    "softmax_empty_row_nan": ("bf16", "an empty row divided 0 by 0"),
    "softmax_implicit_axis": ("bf16", "reduction ran over axis 0 instead of the last"),
    "softmax_last_odd_entry_left_out": ("bf16", "last entry were left out of the sum"),
    "log_of_softmax": ("bf16", "logarithm of a softmax that underflowed in fp32"),
    "logsumexp_without_max": ("bf16", "without subtracting a maximum"),
    "logsumexp_base_two": ("bf16", "the LSE were in base 2"),
    # Multi-head latent attention.
    "mla_rope_part_omitted": ("bf16", "rotary part were left out of the scores"),
    "mla_scale_from_content_dim": ("bf16", "scale were that of the content part alone"),
    "mla_divides_by_scale": ("bf16", "scores were divided by the scale"),
    "mla_rope_key_per_head": ("bf16", "head h read k_pe of key j + h"),
    "mla_absorbed_value_heads_reversed": ("bf16", "W_UV were applied with the heads reversed"),
}


def subject_of(spec: str, dtype: str) -> Subject:
    target = resolve(spec)
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def rows_of(mutant: Mutant) -> tuple[Property, ...]:
    table = APPLY_PROPERTIES if mutant.op == "rope_apply" else properties_for(mutant.op)
    return tuple(row for row in table if row.id == mutant.killed_by)


def failures(subject: Subject, rows: tuple[Property, ...]) -> Iterator[Record]:
    """The smallest failing case that a search finds, else the first failing edge; row by row."""
    for row in rows:
        found = hunt(subject, replace(row, edges=no_edges), seed=1) if row.search is not None else []
        yield from (r for r in found if r.verdict in BAD)
    for row in rows:
        for edge in row.edges(subject):
            record = examine(subject, row, edge)
            if record.verdict in BAD:
                yield record


@pytest.mark.parametrize("name", LOOKS)
def test_the_smallest_failing_case_of_a_mutant_is_explained(name: str) -> None:
    dtype, words = LOOKS[name]
    mutant = mutant_named(name)
    record = next(failures(subject_of(mutant.target, dtype), rows_of(mutant)))
    assert words in record.diagnosis
    assert record.diagnosis.startswith("as if ") or ": as if " in record.diagnosis


TABLED = ("attention", "mla", "rope", "rope_apply", "softmax", "log_softmax", "logsumexp")


def test_every_mutant_that_is_left_out_here_is_known() -> None:
    left_out = {
        # Wrong in no single output of a call, or in its type.
        "query_scaled_in_place", "pads_past_the_end", "memory_behind_v_leaks", "rope_cached_by_length",
        "rope_dynamic_keeps_longest",
        # Wrong in a part of the case that fails, taken alone.
        "rope_single_token_one_behind",
        # Gradients have no table.
        "rope_backward_forward_again", "rope_backward_divides_by_magnitude",
        "rope_promotes", "output_promoted",
        # Wrong beside others, in views, in other calls, or in a part of the case that fails.
        "splits_follow_batch", "strides_ignored", "stride_zero_ignored", "offset_wraps", "sink_ignored_in_decode",
        "dropout_not_rescaled", "dropout_in_evaluation", "dropout_before_the_sum", "dropout_seed_ignored",
        "dropout_same_in_every_call",
        # Other ops than these have no table; the gradients of attention have `test_diagnose_backward`.
        *(m.name for m in mutants() if m.op not in TABLED),
        # One unit in one direction: within the bound, and found by the mean.
        "output_truncated", "weights_truncated", "mla_output_truncated",
        # Its gradient is wrong, its output is not.
        "softmax_gradient_through_rounded_weights",
        # Nothing is promised of the rows that it makes finite.
        "nan_swallowed",
        # The LSE of a part alone is wrong, and not on every case that shows it.
        "lse_finite",
        # No table has this defect: its place is told.
        "rope_llama3_without_smoothing", "rope_ramp_reversed",
        "exp_quadratic", "fused_exponent", "rope_turns_saturate", "weights_in_e4m3",
        "softcap_multiplies_by_tanh", "softcap_by_exponentials", "window_empty_row_sees_all",
        # In eight bits: `meta_tests.properties.test_eight_bits`.
        *(m.name for m in mutants() if m.dtypes == ("e4m3",)),
        # Exact at the smallest case, where it looks like others.
        "approximate_reciprocal",
    }  # fmt: skip
    assert {m.name for m in mutants() if m.name not in LOOKS} <= left_out


# --- cases of the shapes that diagnoses meet ---


def attention_case(
    subject: Subject, *, sq: int = 3, sk: int = 33, heads: int = 2, dims: int = 16, **options: Any
) -> Case:
    rng = np.random.default_rng([sq, sk])
    shapes = {"q": (1, heads, sq, dims), "k": (1, heads, sk, dims), "v": (1, heads, sk, dims)}
    return Case("attention", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, options)


def rope_case(subject: Subject) -> Case:
    x = np.random.default_rng(4).standard_normal((1, 2, 3, 16))
    return Case("rope", {"x": subject.fmt.store(x), "positions": np.array([0, 5, 300])}, {"layout": "half"})


def softmax_case(subject: Subject, op: str = "softmax") -> Case:
    return Case(op, {"x": subject.fmt.store(np.random.default_rng(4).standard_normal((3, 40)))})


def mla_case(subject: Subject) -> Case:
    rng = np.random.default_rng(4)
    shapes = {
        "q_nope": (1, 2, 3, 8), "q_pe": (1, 2, 3, 4), "c_kv": (1, 20, 16), "k_pe": (1, 20, 4),
        "w_uk": (2, 8, 16), "w_uv": (2, 8, 16),
    }  # fmt: skip
    return Case("mla", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, {})


def case_for(subject: Subject) -> Case:
    match subject.op:
        case "attention":
            return attention_case(subject)
        case "rope":
            return rope_case(subject)
        case "mla":
            return mla_case(subject)
        case "rope_apply":
            x = rope_case(subject).arrays["x"]
            angle = np.arange(24.0).reshape(3, 8)
            return Case(
                "rope_apply", {"x": x, "cos": subject.fmt.store(np.cos(angle)), "sin": subject.fmt.store(np.sin(angle))}
            )
        case "softmax" | "log_softmax" | "logsumexp":
            return softmax_case(subject, subject.op)
        case _:
            return tiny_case(subject.op, subject.dtype)


def broken(function: Callable[..., Any], op: str, dtype: str) -> Subject:
    stated = {"causal_alignment": "bottom_right"} if op == "attention" else {}
    function.__attn_oracle__ = {"op": op, "conventions": stated}  # type: ignore[attr-defined]
    return subject_for(target_from(function, spec="made:here", op=op), dtype, profile=PROFILE)


def attention_with(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Honest attention, then ``change(out, lse, q)``."""

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
        out, lse = flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=True)
        out, lse = change(out, lse, q)
        return (out, lse) if return_lse else out

    return attention


# --- nothing is claimed that is not so ---


@pytest.mark.parametrize("honest", HONEST, ids=lambda h: h.name)
def test_an_honest_kernel_has_no_diagnosis(honest: Any) -> None:
    subject = subject_of(honest.target, honest.dtypes[-1])
    assert diagnose(subject, case_for(subject)) == ""


@pytest.mark.parametrize("spec", ["targets.honest.flash:attention", "targets.honest.rope:rope"])
def test_a_passing_search_asks_for_no_diagnosis(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(spec, "bf16")
    row = next(p for p in properties_for(subject.op) if p.id == "P1")

    def refuse(*_: Any) -> str:
        raise AssertionError("diagnosed a case that does not fail")

    monkeypatch.setattr(search, "diagnose", refuse)
    records = hunt(subject, replace(row, edges=no_edges))
    assert [r.verdict for r in records] == [Verdict.PASS]


def noisy(values: Tensor, size: float) -> Tensor:
    """The same values always get the same noise."""
    generator = torch.Generator().manual_seed(zlib.crc32(values.double().numpy().tobytes()))
    return (values.double() + size * torch.randn(values.shape, generator=generator).double()).to(values.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [0.003, 0.1, 1.0])
@pytest.mark.parametrize("op", ["attention", "rope", "softmax"])
def test_noise_is_placed_and_not_explained(op: str, size: float, dtype: str) -> None:
    def rope(x: Tensor, positions: Tensor, *, base: float = 10000.0, layout: str = "half") -> Tensor:
        return noisy(honest_rope.rope(x, positions, base=base, layout=layout), size)

    def softmax(x: Tensor) -> Tensor:
        return noisy(honest_softmax.softmax(x), size)

    attention = attention_with(lambda out, lse, q: (noisy(out, size), noisy(lse, size)))
    subject = broken({"attention": attention, "rope": rope, "softmax": softmax}[op], op, dtype)
    case = case_for(subject)
    failing = failing_case(subject, case, subject.call(case).outputs)
    found = diagnose(subject, case)
    assert "as if" not in found
    assert ("wrong" in found) or not failing.broken()
    assert failing.broken() or size == 0.003


def test_two_defects_are_not_taken_for_one() -> None:
    steps = flash.Steps(scale_of=lambda given, dim: 1.0, kv_head=lambda heads, shared: torch.arange(heads) % shared)
    subject = broken(flash.kernel(steps, conventions={"causal_alignment": "bottom_right"}), "attention", "fp32")
    rng = np.random.default_rng(2)
    shapes = {"q": (1, 4, 3, 16), "k": (1, 2, 9, 16), "v": (1, 2, 9, 16)}
    case = Case("attention", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, {})
    assert diagnose(subject, case).startswith("wrong ")


def test_a_fault_at_one_input_alone_is_not_explained_by_what_fresh_numbers_contradict() -> None:
    seen: list[Tensor] = []

    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        seen[:] = seen or [q.clone()]
        return (out * 0, lse) if q.shape == seen[0].shape and torch.equal(q, seen[0]) else (out, lse)

    subject = broken(attention_with(change), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "wrong only in the output, not the LSE"


def test_zeros_everywhere_are_explained_by_zeros() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "as if the output were zeros"


def test_an_output_that_is_another_in_each_call_has_no_explanation() -> None:
    calls: list[int] = []

    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return out * (len(calls) + 1), lse

    subject = broken(attention_with(change), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "another result in a second call"


# --- where ---


def failing_with(change: Callable[..., tuple[Tensor, Tensor]], *, dtype: str = "bf16", **shape: Any) -> FailingCase:
    subject = broken(attention_with(change), "attention", dtype)
    case = attention_case(subject, **shape)
    return failing_case(subject, case, subject.call(case).outputs)


def with_values(where: Any, value: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        out = out.clone()
        out[where] = value
        return out, lse

    return change


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ((0, 1), 9.0, "wrong only in the output, not the LSE, head 1"),
        ((0, slice(None), -1), 9.0, "wrong only in the output, not the LSE, the last row"),
        ((0, 0, slice(3, None)), 9.0, "wrong only in the output, not the LSE, head 0, rows >= 3"),
        ((..., slice(8, None)), 9.0, "wrong only in the output, not the LSE, columns >= 8"),
        ((..., slice(0, None, 4)), 9.0, "wrong only in the output, not the LSE, columns 0 modulo 4"),
        (
            (0, slice(None), 1),
            float("nan"),
            "wrong only in the output, not the LSE, row 1; inf or NaN wherever it is wrong",
        ),
    ],
)
def test_the_place_is_told(where: Any, value: float, text: str) -> None:
    assert where_wrong(failing_with(with_values(where, value), sq=6)) == text


def test_an_output_that_is_wrong_everywhere_is_called_so() -> None:
    assert where_wrong(failing_with(lambda out, lse, q: (out + 9, lse + 9))) == "wrong everywhere"


@pytest.mark.parametrize(
    ("wrong", "every", "text"),
    [
        ([], 8, ""),
        (list(range(8)), 8, ""),
        ([7], 8, "the last row"),
        ([0], 8, "the first row"),
        ([3], 8, "row 3"),
        ([1], 2, "row 1"),
        ([4, 5, 7], 8, "rows >= 4"),
        ([2, 3, 4], 8, "rows 2 .. 4"),
        ([0, 1, 2, 3], 8, "rows <= 3"),
        ([1, 3, 5, 7], 8, "rows 1 modulo 2"),
        ([0, 9], 16, "rows 0, 9"),
        ([0, 5, 6, 11, 15], 16, ""),
    ],
)
def test_patterns_of_indices(wrong: list[int], every: int, text: str) -> None:
    assert pattern(wrong, list(range(every)), "row", "rows") == text


def test_a_case_that_is_too_large_is_placed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    monkeypatch.setattr(engine, "LARGEST_CASE", 100)
    assert diagnose(subject, attention_case(subject)) == "wrong only in the output, not the LSE"


def test_without_time_nothing_is_claimed() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    assert diagnose(subject, attention_case(subject), seconds=0.0) == "wrong only in the output, not the LSE"


def test_a_known_defect_is_asked_about_first_and_claimed_only_if_it_fits() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    case = attention_case(subject)
    # Without time for the table, what is known is all that is asked.
    assert diagnose(subject, case, seconds=0.0, known=("as if the output were zeros",)) == "as if the output were zeros"
    assert diagnose(subject, case, seconds=0.0, known=("as if the output were negated",)).startswith("wrong ")
    assert diagnose(subject, case, known=("as if the output were negated",)) == "as if the output were zeros"


def test_a_list_of_failures_is_asked_once_about_all_counterfactuals(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(PROFILE, shrink_seconds=60.0)
    subject = replace(subject_of(mutant_named("gqa_tiled").target, "bf16"), profile=profile)
    row = next(p for p in properties_for("attention") if p.id == "P13")
    asked: list[str] = []
    whole = engine._claim

    def counted(failing: FailingCase, deadline: float) -> str:
        asked.append(whole(failing, deadline))
        return asked[-1]

    monkeypatch.setattr(engine, "_claim", counted)
    bad = [r for r in hunt(subject, replace(row, search=None)) if r.verdict in BAD and r.diagnosis]
    assert len(bad) > 2
    assert {r.diagnosis for r in bad} == {"as if KV heads were tiled (h mod Hkv) instead of repeated"}
    assert len(asked) == 1


# --- the tables ---


@pytest.mark.parametrize("op", ["attention", "mla", "rope", "rope_apply", "softmax", "log_softmax", "logsumexp"])
def test_counterfactuals_of_a_table_are_told_apart(op: str) -> None:
    names = [row.name for row in table_of(op).hypotheses]
    assert len(set(names)) == len(names)
    honest = next(h for h in HONEST if h.op == op)
    subject = subject_of(honest.target, "bf16")
    case = case_for(subject)
    failing = failing_case(subject, case, subject.call(case).outputs)
    for row in table_of(op).hypotheses:
        sentences = [c.sentence for c in row.imagine(failing)]
        assert len(set(sentences)) == len(sentences)
        assert all("{" not in s for s in sentences)


def odd_cases(op: str) -> Iterator[tuple[str, Case]]:
    """(dtype, case) of shapes and options that a table may not have thought of."""
    rng = np.random.default_rng(7)

    def drawn(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
        return {n: FORMATS[dtype].store(rng.standard_normal(s)) for n, s in shapes.items()}

    match op:
        case "attention":
            yield "fp64", Case(op, drawn("fp64", q=(1, 1, 1, 1), k=(1, 1, 1, 1), v=(1, 1, 1, 1)), {"scale": -2.0})
            causal = {"is_causal": True, "causal_alignment": "bottom_right"}
            yield "bf16", Case(op, drawn("bf16", q=(2, 6, 5, 3), k=(2, 2, 2, 3), v=(2, 2, 2, 7)), causal)
            yield "fp16", Case(op, drawn("fp16", q=(1, 2, 3, 65), k=(1, 2, 130, 65), v=(1, 2, 130, 4)), {"scale": 0.0})
            arrays = drawn("fp32", q=(2, 2, 3, 4), k=(2, 1, 40, 4), v=(2, 1, 40, 4))
            yield "fp32", Case(op, arrays, {"attn_mask": rng.random((2, 1, 1, 40)) < 0.2})
            additive = np.where(rng.random((3, 40)) < 0.5, -np.inf, 1.0).astype(np.float32)
            yield (
                "fp32",
                Case(op, arrays, {"attn_mask": additive, "is_causal": True, "causal_alignment": "bottom_right"}),
            )
            arrays["v"][0, 0, 3] = np.nan
            yield "fp32", Case(op, arrays, {"attn_mask": np.arange(40) != 3})
        case "mla":
            for dtype, (b, h, sq, sk), causal in (("fp64", (1, 1, 1, 1), False), ("bf16", (2, 3, 4, 2), True)):
                shapes = {
                    "q_nope": (b, h, sq, 3), "q_pe": (b, h, sq, 2), "c_kv": (b, sk, 5), "k_pe": (b, sk, 2),
                    "w_uk": (h, 3, 5), "w_uv": (h, 7, 5),
                }  # fmt: skip
                options = {"is_causal": True, "causal_alignment": "top_left"} if causal else {}
                yield dtype, Case(op, drawn(dtype, **shapes), options)
        case "rope":
            for dtype, shape, positions, options in (
                ("fp64", (1, 1, 1, 2), np.array([0]), {}),
                (
                    "bf16",
                    (2, 1, 3, 7),
                    np.array([[0, 2**24, 5], [70000, 1, 2]]),
                    {"rotary_dim": 4, "layout": "interleaved"},
                ),
                ("fp16", (1, 2, 2, 6), np.array([3, 4]), {"base": 1.5}),
            ):
                yield dtype, Case(op, {**drawn(dtype, x=shape), "positions": positions}, options)
        case "rope_apply":
            yield "fp32", Case(op, drawn("fp32", x=(1, 1, 1, 3), cos=(1, 1), sin=(1, 1)))
        case _:
            for dtype, shape in (("fp64", (1,)), ("bf16", (2, 1, 3)), ("fp16", (3, 40)), ("fp32", (1, 1, 1))):
                arrays = drawn(dtype, x=shape)
                arrays["x"][..., 0] = -np.inf
                yield dtype, Case(op, arrays)


@pytest.mark.parametrize("op", ["attention", "mla", "rope", "rope_apply", "softmax", "log_softmax", "logsumexp"])
def test_no_counterfactual_stumbles_over_odd_shapes(op: str) -> None:
    tried = 0
    for dtype, case in odd_cases(op):
        honest = next(h for h in HONEST if h.op == op)
        target = replace(resolve(honest.target), contract=None)
        subject = subject_for(target, dtype, profile=PROFILE)
        observed = subject.call(case)
        assert observed.fault is None
        wrong = {n: (v.astype(np.float64) * 3 + 1).astype(v.dtype) for n, v in observed.outputs.items()}
        failing = failing_case(subject, case, wrong)
        for row in table_of(op).hypotheses:
            for c in row.imagine(failing):
                assert match(failing, c, quick=False).fits.shape == (len(subject.forms),)
                tried += 1
        related = [make(subject, case) for _, make in table_of(op).related]
        probes = [*(c for c in related if c is not None), *table_of(op).ranges(case), *table_of(op).wider(case)]
        for other in [*probes, fresh_numbers(case, 0)]:
            assert subject.call(other).fault is None
    assert tried > 10


def test_an_op_without_a_table_has_no_diagnosis() -> None:
    assert table_of("fft").hypotheses == ()


# --- predictions ---


def prediction(value: float, bound: float, **masks: bool) -> Prediction:
    array = np.array([[value]])
    zero = np.zeros((1, 1))
    marked = {n: np.full((1, 1), masks.get(n, False)) for n in ("breaks", "lost", "may_break", "free")}
    return Prediction(Enclosure(array, zero, zero), np.array([[bound]]), **marked)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("p", "fits", "misses"),
    [
        (prediction(1.0, 0.5), [1.0, 1.5, 0.5], [1.51, -1.0, INF, NAN]),
        (prediction(1.0, 0.5, may_break=True), [1.0, INF, -INF, NAN], [2.0]),
        (prediction(1.0, 0.5, breaks=True), [INF, NAN], [1.0, 0.0]),
        (prediction(1.0, 0.5, lost=True), [0.0, INF, NAN], [1.0]),
        (prediction(1.0, 0.5, free=True), [1.0, 99.0, INF, NAN], []),
        (prediction(-INF, 0.0), [-INF], [INF, NAN, 0.0]),
        (prediction(-INF, INF), [-INF], [INF, 0.0]),
        (prediction(1.0, INF), [99.0], [NAN]),
    ],
)
def test_what_a_prediction_accepts(p: Prediction, fits: list[float], misses: list[float]) -> None:
    assert all(p.fits(np.array([[y]]))[0, 0] for y in fits)
    assert not any(p.fits(np.array([[y]]))[0, 0] for y in misses)


def test_scaling_a_prediction_scales_its_room() -> None:
    p = prediction(1.0, 0.5).scaled(-2.0)
    assert p.fits(np.array([[-2.9]]))[0, 0]
    assert not p.fits(np.array([[-3.1]]))[0, 0]


# --- message and record ---


def test_the_message_of_a_failure_shows_how_it_looks() -> None:
    subject = subject_of(mutant_named("gqa_tiled").target, "bf16")
    row = next(p for p in properties_for("attention") if p.id == "P13")
    record = next(failures(subject, (row,)))
    lines = failure_message(record).splitlines()
    assert "  looks    as if KV heads were tiled (h mod Hkv) instead of repeated" in lines
    assert not any(line.startswith("  looks") for line in failure_message(replace(record, diagnosis="")).splitlines())


def test_edges_beyond_the_budget_are_not_diagnosed() -> None:
    subject = replace(
        subject_of(mutant_named("scale_one_by_default").target, "bf16"),
        profile=replace(PROFILE, shrink_seconds=0.05),
    )
    row = next(p for p in properties_for("attention") if p.id == "P17")
    bad = [r for r in hunt(subject, replace(row, search=None)) if r.verdict in BAD]
    explained = [bool(r.diagnosis) for r in bad]
    assert explained[0]
    assert not explained[-1]
    assert all(a or not b for a, b in pairwise(explained))
