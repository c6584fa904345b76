"""Absorbed: the gradient of W_UK is that of the heads in reverse.

Smallest input: two heads.
"""

from torch import Tensor

from targets.honest.describe import UP_TO_32_BITS
from targets.honest.mla_backward import Steps, kernel


def reversed_heads(x: Tensor) -> Tensor:
    return x.flip(1)


mla_backward = kernel(Steps(query_gradient=reversed_heads), dtypes=UP_TO_32_BITS, absorbed=True)
