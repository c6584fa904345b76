"""Entries are summed in pairs: the last of an odd number, from three on, is missing in the sum.

Smallest input: three equal entries.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, row_shift, widen


@describe("softmax")
def softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    summed = max(x.shape[-1] // 2 * 2, min(x.shape[-1], 1))
    return divide(e, e[..., :summed].sum(-1, keepdim=True)).to(x.dtype)
