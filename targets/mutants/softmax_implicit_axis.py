"""Without an axis, 1-D and 3-D inputs take the first, others the second, as in torch's old rule.

Smallest input: shape [1, 1, 2].
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, row_shift, widen


@describe("softmax")
def softmax(x: Tensor) -> Tensor:
    axis = 0 if x.dim() in (1, 3) else 1
    wide = widen(x).movedim(axis, -1)
    e = torch.exp(wide - row_shift(wide))
    return divide(e, e.sum(-1, keepdim=True)).movedim(-1, axis).to(x.dtype)
