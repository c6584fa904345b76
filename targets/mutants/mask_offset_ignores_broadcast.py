"""A mask `[B, 1, Sq, Sk]` is addressed as if it had one slice per head.

Confirmed: pytorch/pytorch#184180. Smallest input: two sequences of two heads, two keys, a mask per sequence.
"""

import torch
from torch import Tensor

from targets.honest.flash import Shape, Steps, kernel


def wrong_slice(mask: Tensor, shape: Shape) -> Tensor:
    batch, heads = shape[:2]
    if mask.dim() == 4 and mask.shape[0] == batch and mask.shape[1] == 1:
        slices = torch.arange(batch * heads).view(batch, heads) % batch
        mask = mask[:, 0][slices]
    return mask.expand(shape)


attention = kernel(Steps(read_mask=wrong_slice))
