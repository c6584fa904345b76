"""e^x without subtracting the maximum: overflows above 88, and is 0 / 0 below -104.

Smallest input: one entry, 1000.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, widen


@describe("softmax")
def softmax(x: Tensor) -> Tensor:
    e = torch.exp(widen(x))
    return divide(e, e.sum(-1, keepdim=True)).to(x.dtype)
