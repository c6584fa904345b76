"""The last tile of V is loaded whole; what lies behind the tensor meets weights of zero, and 0 * NaN is NaN.

Reported, for the unused slots of a cache: Dao-AILab/flash-attention#2374.
Smallest input: one key whose value is the first of two rows of a buffer, the second NaN.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def behind(v: Tensor) -> Tensor:
    """What a full last tile would read behind V, never beyond the storage: a crash would prove nothing."""
    end = v.storage_offset() + v.numel()
    room = v.untyped_storage().nbytes() // v.element_size() - end
    length = min(room, -v.shape[-2] % flash.TILE * v.shape[-1])
    return v.as_strided((max(length, 0),), (1,), end) if v.is_contiguous() else v.new_zeros(0)


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
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, flash.HONEST, q.dtype)
    leaked = (0.0 * behind(v).float()).sum()
    out = torch.cat((out[:, :-1], out[:, -1:] + leaked), 1).to(q.dtype)
    return (out, log) if return_lse else out
