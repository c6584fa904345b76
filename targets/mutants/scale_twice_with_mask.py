"""The path that takes a mask scales the query, and then the scores again.

Smallest input: one visible key, D = 4, a mask.
"""

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
    once = flash.scale_of(scale, q.shape[-1])
    used = once if attn_mask is None else once * once
    return flash.attention(q, k, v, scale=used, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
