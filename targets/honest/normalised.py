"""Attention in two sweeps over the keys: first the row's maximum and sum, then P V with P already divided by
the sum.

The cast to the input dtype hits the normalised weights, so that small ones lose more than in
`flash.attention`: the form "normalised P" of the contract `flash`.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


@describe("attention", contract={"preset": "flash", "normalised_p": True})
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: flash.Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    steps = flash.HONEST
    problem = flash.prepare(
        q, k, v, steps, scale, is_causal, attn_mask,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    tiles = [slice(start, start + steps.tile) for start in range(0, k.shape[-2], steps.tile)]
    wide = flash.compute_dtype(q.dtype)
    maximum, total = problem.start(steps, 0, wide)
    for keys in tiles:
        tile, _ = problem.scores(steps, keys)
        old, maximum = maximum, flash.row_max(maximum, tile)
        base = flash.shift(maximum)
        p = flash.weights(tile, base)
        total = flash.row_sum(total * flash.rescale(old, base), p, p)

    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
    for keys in tiles:
        tile, seen = problem.scores(steps, keys)
        p = flash.normalise(flash.weights(tile, flash.shift(maximum)), total)
        out = out + flash.weigh(p.to(q.dtype), problem.v[..., keys, :], seen)
    out = out.to(q.dtype)
    return (out, flash.lse(maximum, total).squeeze(-1)) if return_lse else out
