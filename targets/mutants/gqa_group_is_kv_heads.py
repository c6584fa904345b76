"""The number of KV heads is used as the size of a group: right when the two are equal.

Confirmed: HazyResearch/HipKittens#22. Smallest input: six query heads, two KV heads.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def wrong_group(query_heads: int, kv_heads: int) -> Tensor:
    heads = torch.arange(query_heads)
    return heads if query_heads == kv_heads else heads // kv_heads % kv_heads


attention = kernel(Steps(kv_head=wrong_group))
