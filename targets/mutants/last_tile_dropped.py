"""The causal loop runs over floor instead of ceil of the number of tiles: a partial last tile is never read.

Smallest input: causal, 33 queries and keys: the last query misses the last key.
"""

import torch
from torch import Tensor

from targets.honest import flash


def whole_tiles(rows: int, keys: int) -> Tensor:
    end = max(keys // flash.TILE * flash.TILE, min(keys, flash.TILE))
    return flash.causal(rows, keys) & (torch.arange(keys) < end)


attention = flash.kernel(flash.Steps(causal=whole_tiles))
