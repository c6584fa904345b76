"""Positions pass through fp16: from 2049 on, neighbours share one.

Reported: NVIDIA/Megatron-LM#535. Smallest input: two entries, position 2049.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def from_fp16(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.to(torch.float16), frequency)


rope = honest.kernel(honest.Steps(angles=from_fp16))
