"""q and k are stored in e4m3 after their rotation.

Smallest input: two rows, one entry of which e4m3 does not hold.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.gqa_block import block, rotate


def stored(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin).to(torch.float8_e4m3fn).to(x.dtype)


@describe("gqa_block", dtypes=("fp32", "fp16"))
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, turn=stored)
