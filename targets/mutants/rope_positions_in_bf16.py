"""Positions pass through bf16: from 257 on, neighbours share one.

Confirmed: huggingface/transformers#29285. Smallest input: two entries, position 257.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def from_bf16(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.to(torch.bfloat16), frequency)


rope = honest.kernel(honest.Steps(angles=from_bf16))
