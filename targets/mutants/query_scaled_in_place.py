"""The scaled query is written back into the caller's tensor.

Reported: unslothai/unsloth#5001. Smallest input: any; the result is right, the input is not what it was.
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
    result = flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
    if q.is_contiguous():
        with torch.no_grad():
            q.mul_(flash.scale_of(scale, q.shape[-1]))
    return result
