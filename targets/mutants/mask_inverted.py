"""A boolean mask is read as True = hidden.

Confirmed: lucidrains/x-transformers#160. Smallest input: two keys, one hidden.
"""

import torch
from torch import Tensor

from targets.honest.flash import Shape, Steps, kernel


def inverted(mask: Tensor, shape: Shape) -> Tensor:
    return (~mask if mask.dtype == torch.bool else mask).expand(shape)


attention = kernel(Steps(read_mask=inverted))
