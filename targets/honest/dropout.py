"""Attention whose weights are dropped with probability p after the softmax, the others divided by 1 - p.

The denominator is that of all weights. A call without a seed draws afresh; outside of training nothing is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import UP_TO_32_BITS, describe


def kept(shape: torch.Size, p: float, seed: int | None) -> Tensor:
    """True where a weight stays."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.rand(shape, generator=generator) >= p


def dropped(weights: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, weights, 0.0) / (1.0 - p)


def rate(p: float, training: bool) -> float:
    return p if training else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Every decision about what is dropped."""

    kept: Callable[[torch.Size, float, int | None], Tensor] = kept
    dropped: Callable[[Tensor, Tensor, float], Tensor] = dropped
    rate: Callable[[float, bool], float] = rate


HONEST = Drops()


def kernel(drops: Drops = HONEST) -> Callable[..., flash.Result]:
    """A target function with these decisions, in one sweep over all keys."""

    @describe("attention", dtypes=UP_TO_32_BITS)
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
        training: bool = True,
        return_lse: bool = False,
    ) -> flash.Result:
        p = drops.rate(dropout_p, training)
        if p == 0.0:
            return flash.attention(
                q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse
            )
        steps = flash.HONEST
        problem = flash.prepare(q, k, v, steps, scale, is_causal, attn_mask)
        tile, seen = problem.scores(steps, slice(None))
        maximum = tile.amax(-1, keepdim=True)
        weights = flash.weights(tile, flash.shift(maximum))
        total = weights.sum(-1, keepdim=True)
        share = drops.dropped(flash.normalise(weights, total), drops.kept(weights.shape, p, seed), p)
        out = flash.weigh(share.to(q.dtype), problem.v, seen).to(q.dtype)
        return (out, flash.lse(maximum, total).squeeze(-1)) if return_lse else out

    return attention


attention = kernel()
