"""Scanning from the right, a hidden tile stores 0 as the row's maximum, and lower scores never replace it.

Confirmed: Dao-AILab/flash-attention#2082. Smallest input: causal, 33 queries and keys, all scores -200.
"""

import math

import torch
from torch import Tensor

from targets.honest import flash


def max_or_zero(old: Tensor, tile: Tensor) -> Tensor:
    top = flash.row_max(old, tile)
    return torch.where(top == -math.inf, 0.0, top)


attention = flash.kernel(flash.Steps(row_max=max_or_zero, right_to_left=True))
