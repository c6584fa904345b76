"""The cap is s tanh(s) instead of c tanh(s / c).

Reported: Dao-AILab/flash-attention#2402. Smallest input: D = 1, two keys, cap 1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def wrong(tile: Tensor, size: float) -> Tensor:
    return tile * torch.tanh(tile)


attention = kernel(Steps(cap=wrong))
