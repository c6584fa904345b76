"""Rows are rotated in the interleaved layout.

Smallest input: two rows and a head dimension of 4.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.gqa_block import block
from targets.honest.softmax import widen


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = widen(x)[..., ::2], widen(x)[..., 1::2]
    c, s = widen(cos), widen(sin)
    return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2).to(x.dtype)


@describe("gqa_block")
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, turn=interleaved)
