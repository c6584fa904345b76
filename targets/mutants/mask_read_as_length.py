"""A boolean mask is reduced to the number of visible keys, as if every mask were right padding.

Confirmed: microsoft/onnxruntime#18945. Smallest input: three keys, the first hidden.
"""

import torch
from torch import Tensor

from targets.honest.flash import Shape, Steps, kernel


def as_length(mask: Tensor, shape: Shape) -> Tensor:
    mask = mask.expand(shape)
    if mask.dtype != torch.bool:
        return mask
    return torch.arange(shape[-1]) < mask.sum(-1, keepdim=True)


attention = kernel(Steps(read_mask=as_length))
