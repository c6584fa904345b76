"""Every stage runs in the 16-bit input dtype, which the contract does not declare.

Smallest input: 0 and -4.5.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, row_shift


@describe("softmax", dtypes=("fp16", "bf16"))
def softmax(x: Tensor) -> Tensor:
    e = (x - row_shift(x)).exp()
    return divide(e, e.sum(-1, keepdim=True))
