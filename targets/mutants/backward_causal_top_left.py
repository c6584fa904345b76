"""The backward pass aligns the causal mask top-left, the declared alignment is bottom-right.

Smallest input: one query, two keys, causal.
"""

import torch
from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def top_left(rows: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(rows)[:, None]


attention_backward = backward_kernel(BackwardSteps(causal=top_left))
