"""Backward passes of softmax."""

from typing import Any

import torch
from torch import Tensor

from targets.honest.softmax import softmax as forward
from targets.honest.softmax import widen
from targets.mutants.gradients.inputs import entries_and_cotangents
from targets.mutants.mutant import mutant


@mutant(
    "softmax_backward",
    "P28",
    "The sum over the row is left out: dx = y dy.",
    smallest=entries_and_cotangents([1.0], [1.0]),
)
def softmax_backward_delta_dropped(y: Tensor, dy: Tensor) -> Tensor:
    return (widen(y) * widen(dy)).to(y.dtype)


@mutant(
    "softmax_backward",
    "P9",
    "The sum of y dy runs in bf16, entry by entry.",
    smallest=entries_and_cotangents([2.0**-9] * 512, [1.0 + 2.0**-7] * 512),
)
def softmax_backward_sum_in_bf16(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    total = torch.zeros_like(weights[..., :1])
    for entry in torch.split(weights * given, 1, dim=-1):
        total = (total + entry).bfloat16().float()
    return (weights * (given - total)).to(y.dtype)


@mutant(
    "softmax_backward",
    "P18",
    "Entries are summed in pairs: the last of an odd number, from three on, is missing in the sum.",
    smallest=entries_and_cotangents([0.25] * 3, [1.0] * 3),
)
def softmax_backward_last_odd_entry_left_out(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    summed = max(y.shape[-1] // 2 * 2, min(y.shape[-1], 1))
    total = (weights * given)[..., :summed].sum(-1, keepdim=True)
    return (weights * (given - total)).to(y.dtype)


@mutant(
    "softmax_backward",
    "P1",
    "D is divided by the sum of the stored y, as if the rounding of y had to be undone.",
    smallest=entries_and_cotangents([0.5, 0.25], [1.0, 1.0]),
)
def softmax_backward_normalises_again(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    total = (weights * given).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    return (weights * (given - total)).to(y.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        y = forward(x)
        context.save_for_backward(widen(y).to(torch.float8_e4m3fn))
        return y

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Tensor:
        (stored,) = context.saved_tensors
        y, dy = stored.float(), widen(given[0])
        dx: Tensor = y * (dy - (y * dy).sum(-1, keepdim=True))
        return dx.to(given[0].dtype)


@mutant(
    "softmax",
    "P14",
    "The backward pass reads weights stored in e4m3, the forward pass does not.",
    smallest="two unequal entries",
)
def softmax_gradient_through_rounded_weights(x: Tensor) -> Tensor:
    result: Tensor = _Softmax.apply(x)  # type: ignore[no-untyped-call]
    return result
