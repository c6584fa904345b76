"""The causal rule is left out.

Smallest input: two rows.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.flash import attention
from targets.honest.gqa_block import block


def everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


@describe("gqa_block")
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, core=everything)
