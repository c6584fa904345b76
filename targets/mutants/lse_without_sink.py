"""The LSE leaves the sink out, and it is declared to be in.

Smallest input: one key, sink 0.
"""

from dataclasses import replace

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
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask, sinks=sinks)
    out = flash.attend(problem, flash.HONEST, q.dtype)[0].to(q.dtype)
    return (out, flash.attend(replace(problem, sink=None), flash.HONEST, q.dtype)[1]) if return_lse else out
