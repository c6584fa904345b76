"""The options of `targets.honest.flash` beyond scale and masks, as the steps that a mutant replaces.

Window (left, right), both included; soft cap c tanh(S / c); ALiBi -slope |i - j|; a sink, one more logit of the
denominator. Query i of Sq stands at key i + Sk - Sq.
"""

import torch
from torch import Tensor


def before(rows: int, keys: int) -> Tensor:
    """`[Sq, Sk]`: by how many keys a key lies before its query; negative behind it."""
    return torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)


def window(rows: int, keys: int, left: int, right: int) -> Tensor:
    """`[Sq, Sk]`, True inside the window; -1 is without end."""
    distance = before(rows, keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    return seen


def cap(tile: Tensor, size: float) -> Tensor:
    return size * torch.tanh(tile / size)


def slopes_of(slopes: Tensor, batch: int, heads: int) -> Tensor:
    """`[B, Hq]` of `[Hq]` or `[B, Hq]`."""
    return slopes.expand(batch, heads)


def reach(rows: int, keys: int) -> Tensor:
    """`[Sq, Sk]`: what ALiBi multiplies by the slope."""
    return -before(rows, keys).abs()


def alibi(tile: Tensor, slopes: Tensor, reach: Tensor) -> Tensor:
    """Add ALiBi to scaled scores `[B, Hq, Sq, T]`; slopes `[B, Hq]`, reach `[Sq, T]`."""
    return tile + slopes.to(tile.dtype)[..., None, None] * reach.to(tile.dtype)


def sink_of(sinks: Tensor, alpha: float) -> Tensor:
    """The logits `[Hq]` that join the denominators (`alpha` is for those who scale them)."""
    return sinks


def sink_in(split: int) -> bool:
    """Whether a split of the keys counts the sink: one of them does."""
    return split == 0
