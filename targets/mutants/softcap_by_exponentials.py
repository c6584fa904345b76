"""tanh(x) = (e^2x - 1) / (e^2x + 1), which is inf / inf for large x.

Smallest input: one key of score 200, cap 1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def quotient(tile: Tensor, size: float) -> Tensor:
    e = torch.exp(2 * tile / size)
    return size * (e - 1) / (e + 1)


attention = kernel(Steps(cap=quotient))
