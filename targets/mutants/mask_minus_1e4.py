"""Hidden keys get -10000 added instead of being excluded: a larger score comes through.

Smallest input: two keys, the second hidden, with score 20000.
"""

import torch
from torch import Tensor

from targets.honest.flash import Masks, Steps, kernel


def add_minus_1e4(tile: Tensor, seen: Masks) -> Tensor:
    for mask in seen:
        tile = torch.where(mask, tile, tile - 1e4)
    return tile


attention = kernel(Steps(exclude=add_minus_1e4))
