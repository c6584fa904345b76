"""A key's place is counted in 32 bits, and wraps.

Reported: thu-ml/SageAttention#386, Dao-AILab/flash-attention#2260. Smallest input: three keys, 2^30 elements apart.
"""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def gathered(k: Tensor) -> Tensor:
    """Keys by their own offsets, in int32."""
    step = k.stride(2)
    if step * (k.shape[2] - 1) < 2**31:
        return k
    held = k.untyped_storage().nbytes() // k.element_size()
    start = (torch.arange(k.shape[2]) * step).to(torch.int32).long() % (held - k.shape[3])
    flat = k.as_strided((held,), (1,), 0)
    rows = flat[start[:, None] + torch.arange(k.shape[3])]
    return rows.expand(*k.shape[:2], *rows.shape)


@describe("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    keys = gathered(k)
    return flash.attention(q, keys, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
