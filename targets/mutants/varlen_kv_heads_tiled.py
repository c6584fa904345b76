"""Packed: KV heads are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1).

Smallest input: four query heads, two KV heads, one sequence of one query and one key.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.layouts import Gathers, varlen


def tiled(query_heads: int, kv_heads: int) -> Tensor:
    return torch.arange(query_heads) % kv_heads


attention_varlen = varlen(Gathers(attend=flash.kernel(flash.Steps(kv_head=tiled))))
