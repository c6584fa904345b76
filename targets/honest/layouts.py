"""Packed and paged attention in plain torch: each sequence is gathered and given to `targets.honest.flash`.

`Gathers` names what a kernel of such a layout decides by itself; a mutant replaces one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import UP_TO_32_BITS, describe


def span(sums: Tensor, sequence: int) -> slice:
    """The tokens of a sequence, from prefix sums `[N + 1]`."""
    start, stop = sums[sequence : sequence + 2].tolist()
    return slice(start, stop)


def keys_of(q_sums: Tensor, k_sums: Tensor, sequence: int) -> slice:
    return span(k_sums, sequence)


def length_of(lengths: Tensor, sequence: int) -> int:
    return int(lengths[sequence])


def pages_of(table: Tensor, sequence: int, length: int, page_size: int) -> Tensor:
    """The pages that hold the sequence's keys."""
    return table[sequence, : -(-length // page_size)].long()


def gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """`[S, Hkv, D]` of a cache `[pages, page_size, Hkv, D]`."""
    return cache[pages].flatten(0, 1)[:length]


def slopes_of(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes if slopes is None or slopes.ndim == 1 else slopes[sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Every decision about where a sequence lies, and the kernel that each is given to."""

    keys_of: Callable[[Tensor, Tensor, int], slice] = keys_of
    length_of: Callable[[Tensor, int], int] = length_of
    pages_of: Callable[[Tensor, int, int, int], Tensor] = pages_of
    gather: Callable[[Tensor, Tensor, int], Tensor] = gather
    slopes_of: Callable[[Tensor | None, int], Tensor | None] = slopes_of
    attend: Callable[..., flash.Result] = flash.attention


HONEST = Gathers()


def heads_first(packed: Tensor) -> Tensor:
    """`[1, H, S, D]` of `[S, H, D]`."""
    return packed.transpose(0, 1)[None]


def varlen(gathers: Gathers = HONEST, *, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Callable[..., flash.Result]:
    """A target function with these decisions."""

    @describe("attention_varlen", dtypes=dtypes)
    def attention_varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        scale: float | None = None,
        is_causal: bool = False,
        window_size: flash.Window | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> flash.Result:
        """Packed tokens `[total, H, D]`; O `[total_q, Hq, Dv]`, LSE `[Hq, total_q]`."""
        outs, logs = [], []
        for sequence in range(len(cu_seqlens_q) - 1):
            rows = span(cu_seqlens_q, sequence)
            keys = gathers.keys_of(cu_seqlens_q, cu_seqlens_k, sequence)
            out, log = gathers.attend(
                heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys]), scale=scale, is_causal=is_causal,
                window_size=window_size, softcap=softcap, alibi_slopes=gathers.slopes_of(alibi_slopes, sequence),
                sinks=sinks, return_lse=True,
            )  # fmt: skip
            outs.append(out[0].transpose(0, 1))
            logs.append(log[0])
        whole = torch.cat(outs)
        return (whole, torch.cat(logs, dim=1)) if return_lse else whole

    return attention_varlen


def paged(gathers: Gathers = HONEST, *, dtypes: tuple[str, ...] = UP_TO_32_BITS) -> Callable[..., flash.Result]:
    """A target function with these decisions."""

    @describe("attention_paged", dtypes=dtypes)
    def attention_paged(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        window_size: flash.Window | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> flash.Result:
        """q `[B, Hq, Sq, D]` against caches `[pages, page_size, Hkv, D]`; O `[B, Hq, Sq, Dv]`, LSE `[B, Hq, Sq]`."""
        outs, logs = [], []
        for sequence in range(len(q)):
            length = gathers.length_of(cache_seqlens, sequence)
            pages = gathers.pages_of(block_table, sequence, length, k_cache.shape[1])
            k, v = (heads_first(gathers.gather(cache, pages, length)) for cache in (k_cache, v_cache))
            out, log = gathers.attend(
                q[sequence : sequence + 1], k, v, scale=scale, is_causal=is_causal,
                window_size=window_size, softcap=softcap, alibi_slopes=gathers.slopes_of(alibi_slopes, sequence),
                sinks=sinks, return_lse=True,
            )  # fmt: skip
            outs.append(out)
            logs.append(log)
        whole = torch.cat(outs)
        return (whole, torch.cat(logs)) if return_lse else whole

    return attention_paged


attention_varlen = varlen(dtypes=("fp64", *UP_TO_32_BITS))
attention_paged = paged(dtypes=("fp64", *UP_TO_32_BITS))
