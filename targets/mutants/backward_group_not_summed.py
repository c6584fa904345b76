"""dK and dV of a shared KV head hold the share of the first query head of its group.

Smallest input: two query heads, one KV head.
"""

from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def first_of_group(parts: Tensor, kv_heads: int) -> Tensor:
    batch, heads, keys, width = parts.shape
    return parts.view(batch, kv_heads, heads // kv_heads, keys, width)[:, :, 0]


attention_backward = backward_kernel(BackwardSteps(gather=first_of_group))
