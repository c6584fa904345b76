"""The path that also returns the LSE forgets the causal mask.

Confirmed, for the path that returns scores: keras-team/keras#23038.
Smallest input: causal, two queries, two keys, return_lse.
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
    kept = is_causal and not return_lse
    return flash.attention(q, k, v, scale=scale, is_causal=kept, attn_mask=attn_mask, return_lse=return_lse)
