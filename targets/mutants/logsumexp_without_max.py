"""ln sum e^x without taking the maximum out: inf above 88, -inf below -104.

Smallest input: one entry, 1000.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("logsumexp")
def logsumexp(x: Tensor) -> Tensor:
    return torch.exp(widen(x)).sum(-1).log().to(x.dtype)
