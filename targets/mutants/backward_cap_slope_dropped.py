"""The gradient passes the soft cap as if it were the identity.

Smallest input: one query, two keys, a score near the cap.
"""

import torch
from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def identity(capped: Tensor, softcap: float) -> Tensor:
    return torch.ones_like(capped)


attention_backward = backward_kernel(BackwardSteps(cap_slope=identity))
