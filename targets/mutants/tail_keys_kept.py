"""Without a mask, the zeros that fill the last tile of keys are attended to.

Reported: 66RING/tiny-flash-attention#12. Smallest input: one key.
"""

from torch import Tensor
from torch.nn.functional import pad

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
    if attn_mask is None and not is_causal:
        tail = (0, 0, 0, -k.shape[-2] % flash.TILE)
        k, v = pad(k, tail), pad(v, tail)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
