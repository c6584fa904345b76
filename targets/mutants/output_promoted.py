"""16-bit inputs come back in float32: the numbers are right, and whoever calls gets another dtype than he gave.

Smallest input: any in 16 bits; the numbers agree, the dtypes do not.
"""

from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


@describe("attention", dtypes=("fp16", "bf16"))
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
    return (out, log) if return_lse else out
