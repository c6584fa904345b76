"""A lazy kernel skips the rescale when the maximum grows little, but P already uses the new maximum.

Confirmed: meta-pytorch/MSLK#242. Smallest input: a tile with scores 0, then one key with score 1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel
from targets.honest.flash_variants import LAG, lazy_row_max


def weights_of_new_max(tile: Tensor, base: Tensor) -> Tensor:
    return torch.exp(tile - torch.maximum(base, tile.amax(-1, keepdim=True)))


attention = kernel(Steps(row_max=lazy_row_max, weights=weights_of_new_max), contract={"preset": "flash", "lag": LAG})
