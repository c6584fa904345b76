"""The LSE of a row without keys is +inf, though the kernel declares -inf.

Reported: Dao-AILab/flash-attention#978. Smallest input: causal, two queries, one key.
"""

import math

import torch
from torch import Tensor

from targets.honest import flash


def plus_inf_if_empty(maximum: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, math.inf, flash.lse(maximum, total))


attention = flash.kernel(flash.Steps(lse=plus_inf_if_empty))
