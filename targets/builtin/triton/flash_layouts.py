"""The Triton attention kernel on two more layouts: sequences of various lengths end to end, and a paged KV cache.

Both call the forward kernel of `targets.builtin.triton.flash_forward`; each sequence is one dense problem, aligned at
the bottom right.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from targets.builtin.triton.flash_arguments import (
    DTYPES,
    Window,
    options_of,
    strides_of,
    validate_heads,
    validate_kinds,
)
from targets.builtin.triton.flash_forward import run
from targets.calling.declare import declare


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of N sequences: number n has queries cu_seqlens_q[n] to cu_seqlens_q[n + 1], and keys likewise.

    q [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv], any strides; cu_seqlens int32 [N + 1], from 0 to
    the totals, never falling. Options, values, dtypes and errors as `targets.builtin.triton.flash.attention`, with
    alibi_slopes [Hq] or [N, Hq]. Returns out [total_q, Hq, Dv] and with `return_lse` the LSE, float32 [Hq, total_q].
    """
    validate_kinds(q, k, v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q must be [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]; got {shapes}")
    total, heads, head_dim = q.shape
    validate_heads(heads, k.shape[1], head_dim, v.shape[2], shapes)
    longest_q, longest_k = (_longest(*pair) for pair in (("q", cu_seqlens_q, total), ("k", cu_seqlens_k, k.shape[0])))
    sequences = cu_seqlens_q.numel() - 1
    if cu_seqlens_k.numel() - 1 != sequences:
        raise ValueError(f"cu_seqlens_q is of {sequences} sequences, cu_seqlens_k of {cu_seqlens_k.numel() - 1}")
    options = options_of(
        q, batch=sequences, heads=heads, span=longest_q + longest_k, scale=scale, is_causal=is_causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    out = torch.empty((total, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    axes = ("row", "head", "col")
    layout = {
        **strides_of("q", q, axes), **strides_of("k", k, axes), **strides_of("v", v, axes),
        **strides_of("out", out, ("row", "head", "")), **strides_of("lse", lse, ("head", "")),
        "q_batch": 0, "k_batch": 0, "v_batch": 0, "out_batch": 0, "lse_batch": 0,
        "group": heads // k.shape[1], "queries": longest_q, "keys": longest_k,
    }  # fmt: skip
    if longest_q:
        starts_q, starts_k = (starts.to(device=q.device, dtype=torch.int32) for starts in (cu_seqlens_q, cu_seqlens_k))
        run(
            q, k, v, out, lse, options, layout, batch=sequences, heads=heads, return_lse=return_lse,
            starts_q=starts_q.contiguous(), starts_k=starts_k.contiguous(),
        )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention to a paged cache: key j of sequence b is row j % page_size of page block_table[b, j // page_size].

    q [B, Hq, Sq, D], the last Sq positions of each sequence; k_cache [pages, page_size, Hkv, D], v_cache [pages,
    page_size, Hkv, Dv], any strides; block_table int32 [B, max_blocks]; cache_seqlens int32 [B], how many keys each
    sequence has. Pages beyond a sequence's length are never read. Options, values, dtypes and errors as
    `targets.builtin.triton.flash.attention`. Returns out [B, Hq, Sq, Dv] and with `return_lse` the LSE, float32 [B,
    Hq, Sq].
    """
    validate_kinds(q, k_cache, v_cache)
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    fits = q.ndim == k_cache.ndim == v_cache.ndim == 4 and k_cache.shape[:3] == v_cache.shape[:3]
    if not fits or q.shape[3] != k_cache.shape[3]:
        raise ValueError(
            f"q must be [B, Hq, Sq, D], k_cache and v_cache [pages, page_size, Hkv, D or Dv]; got {shapes}"
        )
    batch, heads, queries, head_dim = q.shape
    page_size, kv_heads, value_dim = v_cache.shape[1:]
    validate_heads(heads, kv_heads, head_dim, value_dim, shapes)
    if block_table.ndim != 2 or block_table.shape[0] != batch or tuple(cache_seqlens.shape) != (batch,):
        given = f"{tuple(block_table.shape)}, {tuple(cache_seqlens.shape)}"
        raise ValueError(f"block_table must be [B, max_blocks], cache_seqlens [B]; got {given} for B = {batch}")
    _pages_exist(block_table, cache_seqlens, pages=k_cache.shape[0], page_size=page_size)
    most = block_table.shape[1] * page_size
    options = options_of(
        q, batch=batch, heads=heads, span=queries + most, scale=scale, is_causal=is_causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    out = torch.empty((batch, heads, queries, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    axes, cached = ("batch", "head", "row", "col"), ("batch", "row", "head", "col")
    layout = {
        **strides_of("q", q, axes), **strides_of("k", k_cache, cached), **strides_of("v", v_cache, cached),
        **strides_of("out", out, ("batch", "head", "row", "")), **strides_of("lse", lse, ("batch", "head", "")),
        "group": heads // kv_heads, "queries": queries, "keys": most,
    }  # fmt: skip
    if lse.numel():
        pages, lengths = (t.to(device=q.device, dtype=torch.int32).contiguous() for t in (block_table, cache_seqlens))
        run(
            q, k_cache, v_cache, out, lse, options, layout, batch=batch, heads=heads, return_lse=return_lse,
            starts_k=lengths, pages=pages,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def _longest(name: str, starts: torch.Tensor, total: int) -> int:
    """The longest sequence between prefix sums that are what they must be."""
    if starts.ndim != 1 or starts.numel() < 1 or starts.is_floating_point():
        raise ValueError(f"cu_seqlens_{name} must be int32 [N + 1]; got {starts.dtype} {tuple(starts.shape)}")
    places = starts.tolist()
    lengths = [b - a for a, b in pairwise(places)]
    if places[0] != 0 or places[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_{name} must rise from 0 to {total}; got {places}")
    return max(lengths, default=0)


def _pages_exist(table: torch.Tensor, lengths: torch.Tensor, *, pages: int, page_size: int) -> None:
    """Every page that a sequence's length needs; entries behind them may be anything."""
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        needed = -(-length // page_size)
        if length < 0 or needed > len(row) or not all(0 <= page < pages for page in row[:needed]):
            raise ValueError(f"{length} keys need {needed} pages of {page_size}, out of {pages}; block_table has {row}")


_COMMON: dict[str, object] = {
    "dtypes": tuple(DTYPES.values()),
    "devices": ("cpu", "cuda"),
    "contract": "flash",
    "conventions": {
        "causal_alignment": "bottom_right",
        "lse_base": "e",
        "empty_row": "zero",
        "empty_row_lse": "-inf",
    },
    "framework": "torch",
    "interpreted": True,
}
declare(
    attention_varlen,
    _COMMON
    | {
        "op": "attention_varlen",
        "description": "FlashAttention forward in Triton (interpreted on a CPU), sequences of various lengths",
    },
)
declare(
    attention_paged,
    _COMMON
    | {
        "op": "attention_paged",
        "description": "FlashAttention forward in Triton (interpreted on a CPU), paged KV cache",
    },
)
