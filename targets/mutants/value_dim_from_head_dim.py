"""The extent of V is taken from the head dimension: with Dv > D the columns beyond D stay zero.

Reported: XunhaoLai/native-sparse-attention-triton#27. Smallest input: one key, D = 1, Dv = 2.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


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
    written = torch.arange(v.shape[-1]) < q.shape[-1]
    v = torch.where(written, v, 0.0).to(v.dtype)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
