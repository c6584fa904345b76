"""dQ is added to what an earlier call of the same shape left in its buffer.

Smallest input: any, called twice.
"""

import torch
from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel, scale_gradient

_BUFFERS: dict[tuple[int, ...], Tensor] = {}


def into_buffer(x: Tensor, alpha: float) -> Tensor:
    shape = tuple(x.shape)
    total = _BUFFERS.get(shape, torch.zeros_like(x)).to(x.dtype) + scale_gradient(x, alpha)
    _BUFFERS[shape] = total
    return total


attention_backward = backward_kernel(BackwardSteps(scale_query=into_buffer))
