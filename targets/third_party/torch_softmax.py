"""torch.softmax, torch.log_softmax and torch.logsumexp over the last axis, and torch's own kernel for the way back."""

from __future__ import annotations

import torch

from targets.calling.declare import declare

Tensor = torch.Tensor


def softmax(x: Tensor) -> Tensor:
    """softmax over the last axis, same shape and dtype."""
    return torch.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    """log softmax over the last axis, same shape and dtype."""
    return torch.log_softmax(x, dim=-1)


def logsumexp(x: Tensor) -> Tensor:
    """log sum exp over the last axis, [..., n] -> [...]."""
    return torch.logsumexp(x, dim=-1)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """dx from the stored output y and its cotangent, [..., n] each: the kernel that autograd calls for softmax."""
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


for _function in (softmax, log_softmax, logsumexp, softmax_backward):
    declare(
        _function,
        {
            "op": _function.__name__,
            "dtypes": ("fp64", "fp32", "fp16", "bf16"),
            "description": f"torch.{_function.__name__}"
            if _function is not softmax_backward
            else "torch._softmax_backward_data",
        },
    )
