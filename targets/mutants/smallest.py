"""For each mutant the smallest input on which it differs from its honest counterpart, as keyword arguments.

`SMALLEST[name](dtype)` gives torch tensors in that dtype; all values are exact in each dtype of the mutant.
Without other need heads and batches are single, D and Dv are 1, scores are q k with scale 1. The defects that
no single output shows have their own tests and stand in `SIDE_EFFECTS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Builder = Callable[[torch.dtype], Arguments]
Row = Sequence[float]

SIDE_EFFECTS = (
    "backward_accumulates_across_calls",
    "backward_returns_no_sink_gradient",
    "output_truncated",
    "query_scaled_in_place",
    "weights_truncated",
    "fp8_weights_unscaled",
    "fp8_normalised_then_cast",
    "fp8_weights_saturate",
    "fp8_factors_of_head_zero",
    "fp8_factors_of_keys_dropped",
    "fp8_factors_by_sequence",
    "backward_weights_truncated",
    "mla_output_truncated",
    "mla_backward_intermediates_truncated",
    "pads_past_the_end",
    "output_promoted",
    "softmax_gradient_through_rounded_weights",
    "rope_cached_by_length",
    "rope_dynamic_keeps_longest",
    "rope_promotes",
    "varlen_tile_of_longest",
    "splits_follow_batch",
    "strides_ignored",
    "stride_zero_ignored",
    "offset_wraps",
    "dropout_not_rescaled",
    "dropout_in_evaluation",
    "dropout_before_the_sum",
    "dropout_seed_ignored",
    "dropout_same_in_every_call",
)


def attention(
    q: Sequence[Row], k: Sequence[Row], v: Sequence[Row], *, scale: float | None = 1.0, **more: Any
) -> Builder:
    """One head from the rows of q `[Sq, D]`, k `[Sk, D]`, v `[Sk, Dv]`."""

    def build(dtype: torch.dtype) -> Arguments:
        tensors = {name: torch.tensor([[rows]], dtype=dtype) for name, rows in (("q", q), ("k", k), ("v", v))}
        return {**tensors, "scale": scale, "return_lse": True, **more}

    return build


def heads(query_heads: int, kv_heads: int, *, batch: int = 1, mask: Tensor | None = None, **options: Tensor) -> Builder:
    """Two keys of score 0; the values are 1, 2, 3, ... over batch, head and key."""

    def build(dtype: torch.dtype) -> Arguments:
        values = torch.arange(1, batch * kv_heads * 2 + 1).view(batch, kv_heads, 2, 1).to(dtype)
        q = torch.zeros(batch, query_heads, 1, 1, dtype=dtype)
        return {"q": q, "k": torch.zeros_like(values), "v": values, "attn_mask": mask, "return_lse": True, **options}

    return build


def packed(
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    heads: tuple[int, int] = (1, 1),
    scores: Sequence[float] = (),
    **more: Any,
) -> Builder:
    """Sequences with so many queries and keys of these scores (default: 0); the values are 1, 2, 3, ... over all keys
    and KV heads."""

    def build(dtype: torch.dtype) -> Arguments:
        values = torch.arange(1, sum(keys) * heads[1] + 1).view(-1, heads[1], 1).to(dtype)
        held = torch.tensor(scores or [0.0] * sum(keys)).view(-1, 1, 1).expand(values.shape).to(dtype)
        sums = {n: torch.tensor([0, *accumulate(x)], dtype=torch.int32) for n, x in (("q", queries), ("k", keys))}
        return {
            "q": torch.ones(sum(queries), heads[0], 1, dtype=dtype), "k": held.contiguous(), "v": values,
            "cu_seqlens_q": sums["q"], "cu_seqlens_k": sums["k"], "return_lse": True, **more,
        }  # fmt: skip

    return build


def paged(
    table: Sequence[Sequence[int]], lengths: Sequence[int], *, size: int = 2, last: float | None = None
) -> Builder:
    """One query for each sequence, keys of score 0; the values are 1, 2, 3, ... over all places of all pages."""

    def build(dtype: torch.dtype) -> Arguments:
        pages = max(map(max, table)) + 1
        values = torch.arange(1, pages * size + 1).view(pages, size, 1, 1).to(dtype)
        values[-1, -1] = values[-1, -1] if last is None else last
        return {
            "q": torch.zeros(len(table), 1, 1, 1, dtype=dtype), "k_cache": torch.zeros_like(values), "v_cache": values,
            "block_table": torch.tensor(table, dtype=torch.int32),
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "return_lse": True,
        }  # fmt: skip

    return build


def mla(heads: int, keys: int) -> Builder:
    """All dimensions 1, queries and W_UK 1; latents and rotary keys 1, 2, ... over keys, W_UV over heads."""

    def build(dtype: torch.dtype) -> Arguments:
        ones = torch.ones(1, heads, 1, 1, dtype=dtype)
        keyed = torch.arange(1, keys + 1).view(1, keys, 1).to(dtype)
        headed = torch.arange(1, heads + 1).view(heads, 1, 1).to(dtype)
        return {
            "q_nope": ones, "q_pe": ones.clone(), "c_kv": keyed, "k_pe": keyed.clone(),
            "w_uk": torch.ones_like(headed), "w_uv": headed, "return_lse": True,
        }  # fmt: skip

    return build


def gqa_block(x: Sequence[Row], *, heads: int = 1, kv_heads: int = 1, dim: int = 2, **weights: Any) -> Builder:
    """One sequence; W_Q, W_K, W_V and W_O are diagonals of ones, or 1, 2, 3, ... where ``weights`` name a number.

    The row at position j is turned by j right angles.
    """

    def build(dtype: torch.dtype) -> Arguments:
        rows, width = len(x), len(x[0])
        shapes = {"w_q": heads * dim, "w_k": kv_heads * dim, "w_v": kv_heads * dim}
        eyes = {n: torch.eye(size, width) for n, size in shapes.items()} | {"w_o": torch.eye(heads * dim)}
        counted = {n: torch.arange(1.0, eyes[n].numel() + 1).view_as(eyes[n]) * c for n, c in weights.items()}
        turns = torch.arange(rows)[:, None].expand(rows, dim // 2) * math.pi / 2
        tables = {"cos": turns.cos().round(), "sin": turns.sin().round()}
        tensors = {"x": torch.tensor([x]), **eyes, **counted, **tables}
        return {n: t.to(dtype) for n, t in tensors.items()} | {"num_heads": heads, "num_kv_heads": kv_heads}

    return build


_YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}


def mla_block(x: Sequence[Row], *, start: int = 0, dim: int = 1, rotary: int = 2, **more: Any) -> Builder:
    """One sequence, one head: d_h = d_v = d_c = d_c' = E, all weights diagonals of ones; positions from ``start``."""

    def build(dtype: torch.dtype) -> Arguments:
        rows, width = len(x), len(x[0])
        one, turned = torch.eye(width), torch.eye(rotary, width)
        names = {"w_dkv": one, "w_uk": one[None, :dim], "w_uv": one[None], "w_kr": turned, "w_dq": one}
        names |= {"w_uq": one[None, :dim], "w_qr": turned[None], "w_o": one}
        tensors = {n: t.to(dtype) for n, t in {"x": torch.tensor([x]), **names}.items()}
        options = {n: v.to(dtype) if isinstance(v, Tensor) else v for n, v in more.items()}
        return {**tensors, "positions": torch.arange(start, start + rows), **options}

    return build


def mla_backward(*cotangents: float, keys: int = 1) -> Builder:
    """`mla` with one query, and one cotangent a head."""

    def build(dtype: torch.dtype) -> Arguments:
        given = mla(len(cotangents), keys)(dtype)
        given.pop("return_lse")
        return {**given, "do": torch.tensor(cotangents, dtype=dtype).view(1, -1, 1, 1)}

    return build


def rope(x: Row, position: int, **more: Any) -> Builder:
    """One token."""
    return lambda dtype: {
        "x": torch.tensor([[[x]]], dtype=dtype),
        "positions": torch.tensor([position]),
        **more,
    }


def gradient(dy: Row, position: int, **more: Any) -> Builder:
    """One token."""
    return lambda dtype: {"dy": torch.tensor([[[dy]]], dtype=dtype), "positions": torch.tensor([position]), **more}


def by_axis(x: Row, scaling: Mapping[str, Any]) -> Builder:
    """One token at time 0, height 1, width 2."""
    positions = torch.tensor([[0], [1], [2]])
    return lambda dtype: {"x": torch.tensor([[[x]]], dtype=dtype), "positions": positions, "scaling": scaling}


def _yarn(**more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}


def backward(
    q: Sequence[Row], k: Sequence[Row], v: Sequence[Row], do: Sequence[Row], *, scale: float | None = 1.0, **more: Any
) -> Builder:
    """One head from the rows of q `[Sq, D]`, k `[Sk, D]`, v `[Sk, Dv]`, do `[Sq, Dv]`."""

    def build(dtype: torch.dtype) -> Arguments:
        rows = {"q": q, "k": k, "v": v, "do": do}
        given = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in more.items()}
        return {**{n: torch.tensor([[r]], dtype=dtype) for n, r in rows.items()}, "scale": scale, **given}

    return build


def grouped_backward(dtype: torch.dtype) -> Arguments:
    """Two query heads that share a KV head."""
    q, do = torch.ones(1, 2, 1, 1, dtype=dtype), torch.ones(1, 2, 1, 1, dtype=dtype)
    k = torch.tensor([[[[0.0], [0.0]]]], dtype=dtype)
    return {"q": q, "k": k, "v": torch.tensor([[[[0.0], [1.0]]]], dtype=dtype), "do": do, "scale": 1.0}


_TWO_KEYS = ([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[1.0]])


def softmax(x: Any) -> Builder:
    return lambda dtype: {"x": torch.tensor(x, dtype=dtype)}


def softmax_backward(y: Any, dy: Any) -> Builder:
    return lambda dtype: {"y": torch.tensor(y, dtype=dtype), "dy": torch.tensor(dy, dtype=dtype)}


def visible(*keys: bool) -> Tensor:
    """A mask `[1, Sk]`."""
    return torch.tensor([keys])


def two_sequences(dtype: torch.dtype) -> Arguments:
    return {"x": torch.ones(2, 1, 1, 2, dtype=dtype), "positions": torch.tensor([[0], [1]])}


def two_entries(dtype: torch.dtype) -> Arguments:
    tables = {"cos": torch.tensor([[241 / 256]], dtype=dtype), "sin": torch.tensor([[0.0]], dtype=dtype)}
    return {"x": torch.tensor([[[[137 / 128, 0.0]]]], dtype=dtype), **tables}


ZERO, ONE = [[0.0]], [[1.0]]
TWO_KEYS = ([[0.0], [0.0]], [[1.0], [2.0]])
EMPTY_ROW = attention([[0.0], [0.0]], ZERO, ONE, is_causal=True)
FUTURE = attention([[0.0], [0.0]], *TWO_KEYS, is_causal=True)
UNEQUAL = attention(ZERO, *TWO_KEYS, is_causal=True)
LONG_ROW = attention(ZERO, [[0.0]] * 512, [[1.0]] * 512)
CAPPED = attention(ONE, [[0.0], [3.0]], [[1.0], [2.0]], softcap=1.0)
ONE_SINK = attention(ZERO, ZERO, ONE, sinks=torch.zeros(1))
PARTIAL = rope([1.0] * 8, 1, rotary_dim=4)
YARN = rope([1.0, 1.0], 0, scaling=_yarn())
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.0,
    "short_factor": [1.0], "long_factor": [2.0],
}  # fmt: skip

SMALLEST: Mapping[str, Builder] = {
    "finite_max_sentinel": attention([[-256.0]], [[300.0]], ONE),
    "max_of_current_tile": attention(ONE, [[3.0]] * 32 + [[-100.0]], [[1.0]] * 32 + [[2.0]]),
    "scores_in_fp16": attention([[40.0] * 64], [[40.0] * 64], ONE, scale=None),
    "scores_in_bf16": attention([[1.0, 1.0]], [[1000.0, 0.0], [1000.0, 1.0]], [[0.0], [1.0]]),
    "accumulator_in_fp16": attention(ZERO, [[0.0]] * 2, [[49152.0]] * 2),
    "split_merge_without_max": attention(ONE, [[100.0]] * 2, [[1.0], [2.0]]),
    "zero_max_after_hidden_tile": attention([[1.0]] * 33, [[-200.0]] * 33, [[1.0]] * 33, is_causal=True),
    "fused_exponent": attention([[133120.0] * 64], [[133120.0] * 64], ONE, scale=None),
    "lazy_rescaling_mixes_maxima": attention(ONE, [[0.0]] * 32 + [[1.0]], [[0.0]] * 32 + [[1.0]]),
    "accumulator_through_bf16": attention(ZERO, [[0.0]] * 288, [[8.0]] * 32 + [[1.0], *[[0.0]] * 31] * 8),
    "denominator_in_bf16": LONG_ROW,
    "denominator_in_fp16": attention(ONE, [[0.0], [-1.0]], ONE * 2),
    "tf32_dots": attention([[1 + 2**-12]], [[1 + 2**-12]], ONE),
    "log2e_four_digits": attention(ONE, [[8.0]], ONE),
    "exp_quadratic": attention(ONE, [[0.0], [-0.25]], [[0.0], [1.0]]),
    "gain_one_percent": attention(ZERO, ZERO, ONE),
    "scaled_query_rounded": attention([[1.0] * 3], [[1.0] * 3], ONE, scale=None),
    "approximate_reciprocal": attention(ZERO, ZERO, ONE),
    "denominator_epsilon": attention(ZERO, ZERO, ONE),
    "query_on_fixed_grid": attention([[2**-10]], [[2**10]], ONE),
    "weights_in_e4m3": attention(ONE, [[0.0], [-0.09375]], [[0.0], [1.0]]),
    "empty_row_nan": EMPTY_ROW,
    "mask_as_finfo_min": EMPTY_ROW,
    "mask_minus_1e4": attention([[200.0]], [[0.0], [100.0]], [[1.0], [2.0]], attn_mask=visible(True, False)),
    "mask_adds_minus_inf": attention(ONE, [[0.0], [math.nan]], [[1.0], [2.0]], attn_mask=visible(True, False)),
    "masked_value_leaks": attention(ONE, [[0.0], [0.0]], [[1.0], [math.nan]], attn_mask=visible(True, False)),
    "nan_swallowed": attention([[math.nan]], ZERO, ONE),
    "causal_top_left": UNEQUAL,
    "causal_bottom_right": UNEQUAL,
    "causal_sees_next_key": FUTURE,
    "causal_ignored": FUTURE,
    "causal_dropped_on_full_tiles": attention([[0.0]] * 32, [[0.0]] * 32, [[0.0]] + [[1.0]] * 31, is_causal=True),
    "causal_dropped_with_lse": FUTURE,
    "mask_inverted": attention(ZERO, *TWO_KEYS, attn_mask=visible(True, False)),
    "mask_read_as_length": attention(ZERO, [[0.0]] * 3, [[0.0], [0.0], [1.0]], attn_mask=visible(False, True, True)),
    "mask_ignored_beyond_512": attention(
        ZERO, [[0.0]] * 513, [[0.0]] * 512 + [[512.0]], attn_mask=visible(*[True] * 512, False)
    ),
    "mask_of_head_zero": heads(2, 2, mask=torch.eye(2, dtype=torch.bool).view(1, 2, 1, 2)),
    "mask_offset_ignores_broadcast": heads(2, 2, batch=2, mask=torch.eye(2, dtype=torch.bool).view(2, 1, 1, 2)),
    "first_tile_hidden_nan": attention(ZERO, [[0.0]] * 33, [[1.0]] * 33, attn_mask=visible(*[False] * 32, True)),
    "tail_keys_kept": attention(ZERO, ZERO, ONE),
    "last_key_of_full_tile_dropped": attention(ZERO, [[0.0]] * 32, [[0.0]] * 31 + [[1.0]]),
    "last_tile_dropped": attention([[0.0]] * 33, [[0.0]] * 33, [[0.0]] * 32 + [[1.0]], is_causal=True),
    "last_odd_row_zeroed": attention([[0.0]] * 3, ZERO, ONE),
    "value_tiles_swapped": attention(ONE, [[0.0]] * 95 + [[20.0]], [[0.0]] * 95 + [[1.0]]),
    "head_dim_beyond_64_ignored": attention([[1.0] * 65], [[0.0] * 64 + [1.0]], ONE),
    "value_dim_from_head_dim": attention(ZERO, ZERO, [[1.0, 1.0]]),
    "gqa_tiled": heads(4, 2),
    "gqa_group_is_kv_heads": heads(6, 2),
    "scale_ignored": attention([[1.0] * 4], [[1.0] * 4], ONE, scale=2.0),
    "scale_one_by_default": attention([[1.0] * 4], [[1.0] * 4], ONE, scale=None),
    "scale_from_padded_dim": attention(ONE, ONE, ONE, scale=None),
    "scale_twice_with_mask": attention([[1.0] * 4], [[1.0] * 4], ONE, scale=None, attn_mask=visible(True)),
    "bias_scaled": attention(
        [[0.0] * 4], [[0.0] * 4] * 2, [[0.0], [1.0]], scale=None, attn_mask=torch.tensor([[0.0, 3.0]])
    ),
    "window_one_key_too_far": attention([[0.0], [0.0]], *TWO_KEYS, window_size=(0, 0)),
    "window_one_key_short_in_decode": attention(ZERO, *TWO_KEYS, window_size=(1, 0)),
    "window_without_right_end": attention([[0.0], [0.0]], *TWO_KEYS, window_size=(1, 0)),
    "window_ignored": attention([[0.0], [0.0]], *TWO_KEYS, window_size=(0, 0)),
    "window_ignored_in_decode": attention(ZERO, *TWO_KEYS, window_size=(0, 0)),
    "window_empty_row_sees_all": attention([[0.0], [0.0]], ZERO, ONE, window_size=(0, 0)),
    "softcap_ignored": CAPPED,
    "softcap_after_mask": attention(ZERO, *TWO_KEYS, softcap=1.0, attn_mask=torch.tensor([[0.0, 4.0]])),
    "softcap_multiplies_by_tanh": CAPPED,
    "softcap_by_exponentials": attention(ONE, [[200.0]], ONE, softcap=1.0),
    "alibi_favours_far_keys": attention(ZERO, *TWO_KEYS, alibi_slopes=torch.ones(1)),
    "alibi_ignored": attention(ZERO, *TWO_KEYS, alibi_slopes=torch.ones(1)),
    "slopes_of_head_zero": heads(2, 2, alibi_slopes=torch.tensor([0.0, 1.0])),
    "slopes_of_first_sequence": heads(1, 1, batch=2, alibi_slopes=torch.tensor([[0.0], [1.0]])),
    "sinks_ignored": ONE_SINK,
    "sinks_of_head_zero": heads(2, 2, sinks=torch.tensor([0.0, 4.0])),
    "sink_scaled": attention([[0.0] * 4], [[0.0] * 4], ONE, scale=None, sinks=torch.tensor([2.0])),
    "sink_in_every_split": attention(ZERO, *TWO_KEYS, sinks=torch.zeros(1)),
    "sink_ignored_in_decode": ONE_SINK,
    "sink_dropped_with_window": attention(ZERO, ZERO, ONE, sinks=torch.zeros(1), window_size=(0, 0)),
    "lse_without_sink": ONE_SINK,
    "lse_base_two": attention(ONE, ONE, ONE),
    "lse_plus_inf": EMPTY_ROW,
    "lse_finite": EMPTY_ROW,
    "backward_delta_dropped": backward(*_TWO_KEYS),
    "backward_group_not_summed": grouped_backward,
    "backward_ignores_mask": backward([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[1.0]], window_size=(0, 0)),
    "backward_without_sink_gradient": backward([[1.0]], [[0.0]], [[1.0]], [[1.0]], sinks=torch.zeros(1)),
    "backward_ds_in_fp16": backward([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[2.0**-30]]),
    "backward_cap_slope_dropped": backward([[2.0]], [[0.0], [1.0]], [[0.0], [1.0]], [[1.0]], softcap=1.0),
    "backward_ignores_cotangent": backward([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[2.0]]),
    "backward_key_scale_missing": backward(*_TWO_KEYS, scale=0.5),
    "backward_last_query_dropped": backward(*_TWO_KEYS),
    "backward_bias_gradient_scaled": backward(*_TWO_KEYS, scale=0.5, attn_mask=torch.zeros(1, 1, 1, 2)),
    "backward_causal_top_left": backward(*_TWO_KEYS, is_causal=True),
    "backward_weights_in_e4m3": backward([[1.0]], [[0.0]] * 3, [[0.0], [1.0], [2.0]], [[1.0]]),
    "varlen_query_lengths_for_keys": packed([1, 1], [2, 1]),
    "varlen_neighbour_attended": packed([1, 1], [1, 1]),
    "varlen_slopes_of_first_sequence": packed([1, 1], [2, 2], alibi_slopes=torch.tensor([[0.0], [1.0]])),
    "varlen_kv_heads_tiled": packed([1], [1], heads=(4, 2)),
    "varlen_weights_in_e4m3": packed([1], [2], scores=[0.0, -0.09375]),
    "paged_lse_finite": paged([[0]], [0]),
    "paged_last_page_dropped": paged([[0, 1]], [3]),
    "paged_page_off_by_one": paged([[0, 1]], [2]),
    "paged_length_of_previous": paged([[0], [1]], [1, 2]),
    "paged_padding_attended": paged([[0]], [1]),
    "paged_padding_times_zero": paged([[0]], [1], last=math.nan),
    "paged_pages_in_order": paged([[0, 2]], [2], size=1),
    "rope_layout_ignored": rope([1.0] * 4, 1, layout="interleaved"),
    "rope_layouts_swapped": rope([1.0] * 4, 1),
    "rope_halves_exchanged": rope([1.0, 0.0], 0),
    "rope_positions_in_bf16": rope([1.0, 1.0], 257),
    "rope_positions_in_fp16": rope([1.0, 1.0], 2049),
    "rope_frequencies_in_bf16": rope([1.0] * 4, 100, base=1000.0),
    "rope_table_in_input_dtype": rope([1.0, 1.0], 1),
    "rope_turns_saturate": rope([1.0, 1.0], 2**18),
    "rope_table_too_short": rope([1.0, 1.0], 4096),
    "rope_exponent_of_pair": rope([1.0] * 4, 1),
    "rope_sine_negated": rope([1.0, 1.0], 1),
    "rope_base_10050": rope([1.0] * 4, 1),
    "rope_base_ignored": rope([1.0] * 4, 1, base=100.0),
    "rope_rotates_everything": rope([1.0] * 4, 1, rotary_dim=2),
    "rope_exponent_of_head_dim": PARTIAL,
    "rope_partial_twice": PARTIAL,
    "rope_positions_restart": rope([1.0, 1.0], 1),
    "rope_positions_of_first_sequence": two_sequences,
    "rope_magnitude_ignored": YARN,
    "rope_magnitude_squared": YARN,
    "rope_attention_factor_ignored": rope([1.0, 1.0], 0, scaling=_yarn(attention_factor=1.0)),
    "rope_linear_multiplies": rope([1.0, 1.0], 1, scaling={"rope_type": "linear", "factor": 2.0}),
    "rope_dynamic_constant": rope(
        [1.0] * 4, 1, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}
    ),
    "rope_llama3_without_smoothing": rope(
        [1.0] * 4,
        8,
        base=81.0,
        scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "rope_ramp_reversed": rope([1.0, 1.0], 1, scaling=_yarn()),
    "rope_ramp_always_truncated": rope(
        [1.0] * 4, 100, scaling=_yarn(truncate=False, original_max_position_embeddings=6283)
    ),
    "rope_longrope_short_always": rope([1.0, 1.0], 64, scaling=LONG),
    "rope_longrope_long_always": rope([1.0, 1.0], 1, scaling=LONG),
    "rope_longrope_one_early": rope([1.0, 1.0], 63, scaling=LONG),
    "rope_sections_swapped": by_axis([1.0] * 4, {"rope_type": "default", "mrope_section": [0, 1, 1]}),
    "rope_sections_never_interleaved": by_axis(
        [1.0] * 12, {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    ),
    "rope_single_token_one_behind": rope([1.0, 1.0], 1),
    "rope_backward_forward_again": gradient([1.0, 1.0], 1),
    "rope_backward_divides_by_magnitude": gradient([1.0, 1.0], 0, scaling=_yarn()),
    "rope_apply_truncates": two_entries,
    "softmax_without_max": softmax([1000.0]),
    "softmax_sum_in_bf16": softmax([0.0] * 512),
    "softmax_in_input_dtype": softmax([0.0, -4.5]),
    "softmax_empty_row_nan": softmax([-math.inf]),
    "softmax_implicit_axis": softmax([[[0.0, 0.0]]]),
    "softmax_last_odd_entry_left_out": softmax([0.0] * 3),
    "softmax_backward_delta_dropped": softmax_backward([1.0], [1.0]),
    "softmax_backward_sum_in_bf16": softmax_backward([2.0**-9] * 512, [1.0 + 2.0**-7] * 512),
    "softmax_backward_last_odd_entry_left_out": softmax_backward([0.25] * 3, [1.0] * 3),
    "softmax_backward_normalises_again": softmax_backward([0.5, 0.25], [1.0, 1.0]),
    "log_of_softmax": softmax([0.0, -200.0]),
    "logsumexp_without_max": softmax([[1000.0]]),
    "logsumexp_base_two": softmax([[1.0]]),
    "gqa_block_kv_heads_tiled": gqa_block([[1.0]], heads=4, kv_heads=2, w_v=1.0),
    "gqa_block_sees_the_future": gqa_block([[0.0, 0.0], [0.0, 1.0]]),
    "gqa_block_rotation_of_pairs": gqa_block([[1.0, 0.0, 0.0, 2.0], [0.0, 2.0, 1.0, 0.0]], dim=4),
    "gqa_block_output_heads_interleaved": gqa_block([[1.0]], heads=2, kv_heads=2, w_v=1.0),
    "gqa_block_scores_in_fp8": gqa_block([[1.0, 0.0], [0.0, 17.0 / 16]]),
    "mla_backward_delta_dropped": mla_backward(1.0),
    "mla_backward_first_head_only": mla_backward(1.0, 1.0),
    "mla_backward_values_detached": mla_backward(1.0),
    "mla_backward_absorbed_key_weights_reversed": mla_backward(1.0, -1.0, keys=2),
    "mla_block_latents_in_e4m3_unscaled": mla_block([[500.0]], scale=0.0),
    "mla_block_key_not_rotated": mla_block([[0.0, 1.0], [1.0, 0.0]]),
    "mla_block_positions_ignored": mla_block([[0.0, 2.0], [2.0, 0.0]], start=3),
    "mla_block_eps_outside_the_root": mla_block(
        [[0.5]], norm_kv=torch.ones(1), norm_q=torch.ones(1), eps=1.0, scale=0.0
    ),
    "mla_block_scale_from_content_dim": mla_block([[0.0, 1.0], [1.0, 0.0]]),
    "mla_block_scaling_ignored": mla_block([[0.0, 2.0], [2.0, 0.0]], scaling={"rope_type": "linear", "factor": 4.0}),
    "mla_block_magnitude_ignored": mla_block(
        [[0.0, 0.15625], [0.15625, 0.0]], scaling={**_YARN, "attention_factor": 8.0}
    ),
    "mla_block_mscale_once": mla_block(
        [[0.0, 0.09375], [0.09375, 0.0]], scaling={**_YARN, "mscale": 24.0, "mscale_all_dim": 24.0}
    ),
    "mla_rope_part_omitted": mla(1, 1),
    "mla_scale_from_content_dim": mla(1, 1),
    "mla_divides_by_scale": mla(1, 1),
    "mla_rope_key_per_head": mla(2, 2),
    "mla_absorbed_value_heads_reversed": mla(2, 1),
}
