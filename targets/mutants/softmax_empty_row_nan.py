"""A row that is all -inf gives NaN, though zeros are declared.

Smallest input: one entry, -inf.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("softmax")
def softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)
