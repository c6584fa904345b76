"""Variable-length and paged attention written as what they mean: gather each sequence, attend, put the rows back.

Precision, values and options are those of `targets.builtin.eager.attention` (contract ``eager``).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from targets.builtin import eager
from targets.calling.declare import declare

Tensor = torch.Tensor


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv], int32 prefix sums [N + 1].

    alibi_slopes [Hq] or [N, Hq]. Returns out [total_q, Hq, Dv] (and LSE [Hq, total_q], float32).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.zeros((q.shape[1], q.shape[0]), dtype=wide, device=q.device)
    places = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for sequence, (rows, keys) in enumerate(places):
        queries, key, value = (
            t[slice(*place)].transpose(0, 1)[None] for t, place in ((q, rows), (k, keys), (v, keys))
        )  # fmt: skip
        part, log = eager.attention(
            queries, key, value, scale=scale, is_causal=is_causal, window_size=window_size, softcap=softcap,
            alibi_slopes=_slopes_of(alibi_slopes, sequence), sinks=sinks, return_lse=True,
        )  # fmt: skip
        out[slice(*rows)] = part[0].transpose(0, 1)
        lse[:, slice(*rows)] = log[0]
    return (out, lse) if return_lse else out


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], the last Sq positions; caches [pages, page_size, Hkv, D or Dv]; block_table [B, max_blocks].

    Key j of sequence b is row j % page_size of page block_table[b, j // page_size], j < cache_seqlens[b].
    Returns out [B, Hq, Sq, Dv] (and LSE [B, Hq, Sq], float32).
    """
    page_size = k_cache.shape[1]
    parts = []
    for sequence, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[sequence, : -(-length // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        parts.append(eager.attention(
            q[sequence : sequence + 1], key, value, scale=scale, is_causal=is_causal, window_size=window_size,
            softcap=softcap, alibi_slopes=_slopes_of(alibi_slopes, sequence), sinks=sinks, return_lse=True,
        ))  # fmt: skip
    out, lse = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return (out, lse) if return_lse else out


def _slopes_of(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes if slopes is None or slopes.ndim == 1 else slopes[sequence]


_COMMON: dict[str, object] = {
    "dtypes": ("fp64", "fp32", "fp16", "bf16"),
    "contract": "eager",
    "conventions": {"causal_alignment": "bottom_right", "empty_row": "zero", "empty_row_lse": "-inf"},
}
declare(
    attention_varlen,
    _COMMON
    | {
        "op": "attention_varlen",
        "description": "eager attention of one sequence after the other",
    },
)
declare(
    attention_paged,
    _COMMON
    | {
        "op": "attention_paged",
        "description": "eager attention to keys gathered from a paged cache",
    },
)
