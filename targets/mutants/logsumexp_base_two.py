"""The logarithm has base 2, though natural logarithms are declared.

Smallest input: one entry, 1.
"""

import math

from torch import Tensor

from targets.honest import softmax
from targets.honest.describe import describe


@describe("logsumexp")
def logsumexp(x: Tensor) -> Tensor:
    return (softmax.logsumexp(softmax.widen(x)) / math.log(2.0)).to(x.dtype)
