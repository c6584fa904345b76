"""The row sum runs in bf16, key by key: it sticks at 256.

Reported for a softmax: pytorch/executorch#20089, tenstorrent/tt-metal#52045.
Smallest input: 512 equal scores, V = 1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def sum_in_bf16(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    for weight in torch.split(p, 1, dim=-1):
        total = (total + weight).bfloat16().float()
    return total


attention = kernel(Steps(row_sum=sum_in_bf16), dtypes=("fp16", "bf16"))
