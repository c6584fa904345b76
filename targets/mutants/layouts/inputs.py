"""Smallest inputs of packed sequences and pages."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from targets.mutants.mutant import Arguments, Builder


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


def in_pages(
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
