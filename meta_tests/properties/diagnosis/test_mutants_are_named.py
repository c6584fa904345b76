"""Diagnoses name the defect of a mutant from its smallest failing case.

Mutants are the proving ground: their defect is known, and `LOOKS` says which words must name it.
"""

from __future__ import annotations

import pytest

from meta_tests.properties.diagnosis.cases import (
    failures,
    rows_of,
    subject_of,
)
from targets.mutants.table import mutant_named, mutants

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
    "softmax_implicit_axis": ("bf16", "reduction ran over axis {axis} instead of the last"),
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


@pytest.mark.parametrize("name", LOOKS)
def test_the_smallest_failing_case_of_a_mutant_is_explained(name: str) -> None:
    dtype, words = LOOKS[name]
    mutant = mutant_named(name)
    record = next(failures(subject_of(mutant.target, dtype), rows_of(mutant)))
    # torch's old rule, by the number of axes of the first failing case, which is a drawn one.
    axis = 0 if record.description.partition("[")[2].partition("]")[0].count(",") in (0, 2) else 1
    assert words.format(axis=axis) in record.diagnosis
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
        # Other ops than these have no table; the gradients of attention have `test_backward`.
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
