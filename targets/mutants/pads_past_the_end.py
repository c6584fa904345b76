"""The tail of the last tile of K is zeroed in place, in memory behind the tensor: somebody else's.

Reported, for an append into a full cache: Dao-AILab/flash-attention#638.
Smallest input: one key that is the first of two rows of a buffer.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def zero_the_tail(k: Tensor) -> None:
    """Never beyond the storage: a crash would prove nothing."""
    end = k.storage_offset() + k.numel()
    room = k.untyped_storage().nbytes() // k.element_size() - end
    behind = min(room, -k.shape[-2] % flash.TILE * k.shape[-1])
    if k.is_contiguous() and behind > 0:
        with torch.no_grad():
            k.as_strided((behind,), (1,), end).zero_()


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
    zero_the_tail(k)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
