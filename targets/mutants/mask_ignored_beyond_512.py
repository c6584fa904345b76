"""A boolean mask is read for the first 512 keys only.

Reported: vllm-project/vllm-ascend#15503. Smallest input: one query, 513 keys, the last hidden.
"""

import torch
from torch import Tensor

from targets.honest.flash import Shape, Steps, kernel


def first_512(mask: Tensor, shape: Shape) -> Tensor:
    mask = mask.expand(shape)
    return mask | (torch.arange(shape[-1]) >= 512) if mask.dtype == torch.bool else mask


attention = kernel(Steps(read_mask=first_512))
