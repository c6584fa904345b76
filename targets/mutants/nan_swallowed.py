"""The guard for empty rows asks whether the sum is positive, and turns a NaN row into zeros.

Reported: pytorch/pytorch#141128. Smallest input: one key, q = NaN.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def divide_if_positive(acc: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, acc / total, 0.0)


attention = kernel(Steps(normalise=divide_if_positive))
