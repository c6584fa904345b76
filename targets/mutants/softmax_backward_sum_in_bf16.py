"""The sum of y dy runs in bf16, entry by entry.

Smallest input: 512 equal entries and a constant cotangent.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import widen


@describe("softmax_backward")
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    weights, given = widen(y), widen(dy)
    total = torch.zeros_like(weights[..., :1])
    for entry in torch.split(weights * given, 1, dim=-1):
        total = (total + entry).bfloat16().float()
    return (weights * (given - total)).to(y.dtype)
