"""Query head h reads KV head h mod H_kv.

Smallest input: four heads, two KV heads, one row.
"""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.gqa_block import block, flash_core


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return flash_core(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1))


@describe("gqa_block")
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, core=tiled)
