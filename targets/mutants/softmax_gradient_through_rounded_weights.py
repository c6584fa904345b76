"""The backward pass reads weights stored in e4m3, the forward pass does not.

Smallest input: two unequal entries.
"""

from typing import Any

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import softmax as forward
from targets.honest.softmax import widen


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


@describe("softmax")
def softmax(x: Tensor) -> Tensor:
    result: Tensor = _Softmax.apply(x)  # type: ignore[no-untyped-call]
    return result
