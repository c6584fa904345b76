"""Smallest inputs of attention: without other need single heads and batches, D and Dv of 1, scores q k with scale 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from targets.mutants.mutant import Arguments, Builder, Row


def one_head(
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


def visible(*keys: bool) -> Tensor:
    """A mask `[1, Sk]`."""
    return torch.tensor([keys])


ZERO, ONE = [[0.0]], [[1.0]]
TWO_KEYS = ([[0.0], [0.0]], [[1.0], [2.0]])
EMPTY_ROW = one_head([[0.0], [0.0]], ZERO, ONE, is_causal=True)
FUTURE = one_head([[0.0], [0.0]], *TWO_KEYS, is_causal=True)
UNEQUAL = one_head(ZERO, *TWO_KEYS, is_causal=True)
LONG_ROW = one_head(ZERO, [[0.0]] * 512, [[1.0]] * 512)
CAPPED = one_head(ONE, [[0.0], [3.0]], [[1.0], [2.0]], softcap=1.0)
ONE_SINK = one_head(ZERO, ZERO, ONE, sinks=torch.zeros(1))
