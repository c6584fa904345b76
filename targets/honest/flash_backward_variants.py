"""Honest variants of the backward pass: where D comes from, and what is rounded where."""

import torch
from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def delta_of_weights(do: Tensor, out: Tensor, p: Tensor, dp: Tensor) -> Tensor:
    """sum_j P dP, as the softmax of an automatic differentiation takes it."""
    return (p * dp).sum(-1, keepdim=True)


def exp2_of_scaled(scores: Tensor, log: Tensor, hidden: Tensor) -> Tensor:
    log2_e = 1.4426950408889634
    return torch.exp2(scores * log2_e - log * log2_e).masked_fill(hidden, 0.0)


def keep(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x


def gather_stored(parts: Tensor, kv_heads: int) -> Tensor:
    """Each query head's share is stored as float32 and added in turn."""
    batch, heads, keys, width = parts.shape
    groups = parts.view(batch, kv_heads, heads // kv_heads, keys, width)
    total = torch.zeros_like(groups[:, :, 0])
    for i in range(groups.shape[2]):
        total = total + groups[:, :, i]
    return total


backward_delta_of_weights = backward_kernel(BackwardSteps(delta=delta_of_weights))
backward_exp2 = backward_kernel(BackwardSteps(recompute=exp2_of_scaled))
backward_uncast = backward_kernel(BackwardSteps(cast_weights=keep, cast_gradient=keep))
backward_head_by_head = backward_kernel(BackwardSteps(gather=gather_stored))
