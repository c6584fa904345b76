"""From three full tiles of keys on, the values of the last two change places, as two swapped pages would.

Smallest input: 96 keys, the last one with all the weight.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def swap(v: Tensor) -> Tensor:
    full = v.shape[-2] // flash.TILE
    if full < 3:
        return v
    first, second, end = ((full + i) * flash.TILE for i in (-2, -1, 0))
    return torch.cat((v[..., :first, :], v[..., second:end, :], v[..., first:second, :], v[..., end:, :]), -2)


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
) -> flash.Result:
    return flash.attention(q, k, swap(v), scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
