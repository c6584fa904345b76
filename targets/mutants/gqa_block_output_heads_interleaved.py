"""The heads' outputs are joined entry by entry instead of head by head.

Smallest input: two heads of dimension 2, one row.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.gqa_block import flash_core, linear, rotate, split


@describe("gqa_block")
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    q = rotate(split(linear(x, w_q), num_heads), cos, sin)
    k = rotate(split(linear(x, w_k), num_kv_heads), cos, sin)
    out = flash_core(q, k, split(linear(x, w_v), num_kv_heads))
    return linear(out.permute(0, 2, 3, 1).flatten(-2), w_o)
