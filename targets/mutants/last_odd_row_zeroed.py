"""Queries are handled in pairs: with an odd number of them, from three on, the last stays zero.

Smallest input: three queries, one key with value 1.
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
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, flash.HONEST, q.dtype)
    rows = q.shape[-2]
    written = torch.arange(rows) < max(rows // 2 * 2, 1)
    out = torch.where(written[:, None], out, 0.0).to(q.dtype)
    return (out, log) if return_lse else out
