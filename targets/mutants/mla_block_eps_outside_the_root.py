"""The norm divides by sqrt(mean c^2) + eps.

Smallest input: one latent below eps, and a norm of gain 1.
"""

from torch import Tensor

from targets.honest.mla_block import MATERIALISED, Steps, block
from targets.honest.softmax import widen


def outside(c: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    if gain is None:
        return c
    wide = widen(c)
    root = (wide * wide).mean(-1, keepdim=True).sqrt() + eps
    return (wide / root * widen(gain)).to(c.dtype)


mla_block = block(Steps(normalise=outside), contract=MATERIALISED)
