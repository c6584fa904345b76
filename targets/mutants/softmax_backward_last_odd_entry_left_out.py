"""Entries are summed in pairs: the last of an odd number, from three on, is missing in the sum.

Smallest input: three equal entries and a constant cotangent.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("softmax_backward")
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    summed = max(y.shape[-1] // 2 * 2, min(y.shape[-1], 1))
    total = (weights * given)[..., :summed].sum(-1, keepdim=True)
    return (weights * (given - total)).to(y.dtype)
