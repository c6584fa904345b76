"""A window changes nothing.

Smallest input: window (0, 0), two queries and keys.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def everything(rows: int, keys: int, left: int, right: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


attention = kernel(Steps(window=everything))
