"""KV heads are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1).

Reported: onnx/onnx#7274. Smallest input: four query heads, two KV heads.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def tiled(query_heads: int, kv_heads: int) -> Tensor:
    return torch.arange(query_heads) % kv_heads


attention = kernel(Steps(kv_head=tiled))
