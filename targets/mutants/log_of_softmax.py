"""log_softmax is the logarithm of softmax: a weight that underflows gives -inf.

Smallest input: 0 and -200.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, row_shift, widen


@describe("log_softmax")
def log_softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    return divide(e, e.sum(-1, keepdim=True)).log().to(x.dtype)
