"""Hidden keys get -inf added instead of being excluded: a NaN score stays NaN.

Reported: deepbeepmeep/Wan2GP#1628. Smallest input: two keys, the second hidden and NaN.
"""

import math

import torch
from torch import Tensor

from targets.honest.flash import Masks, Steps, kernel


def add_minus_inf(tile: Tensor, seen: Masks) -> Tensor:
    for mask in seen:
        tile = torch.where(mask, tile, tile - math.inf)
    return tile


attention = kernel(Steps(exclude=add_minus_inf))
