"""The sum over the row is left out: dx = y dy.

Smallest input: one entry.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("softmax_backward")
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    return (widen(y) * widen(dy)).to(y.dtype)
