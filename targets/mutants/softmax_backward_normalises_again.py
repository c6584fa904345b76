"""D is divided by the sum of the stored y, as if the rounding of y had to be undone.

Smallest input: two weights whose sum is not 1.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("softmax_backward")
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    total = (weights * given).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    return (weights * (given - total)).to(y.dtype)
