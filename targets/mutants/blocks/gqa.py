"""The block of grouped queries."""

import torch
from torch import Tensor

from targets.honest.flash import attention
from targets.honest.gqa_block import block, flash_core, linear, rotate, split
from targets.honest.softmax import widen
from targets.mutants.blocks.inputs import gqa_rows
from targets.mutants.mutant import mutant


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return flash_core(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1))


@mutant(
    "gqa_block",
    "P13",
    "Query head h reads KV head h mod H_kv.",
    smallest=gqa_rows([[1.0]], heads=4, kv_heads=2, w_v=1.0),
)
def gqa_block_kv_heads_tiled(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, core=tiled)


def everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


@mutant(
    "gqa_block",
    "P4",
    "The causal rule is left out.",
    smallest=gqa_rows([[0.0, 0.0], [0.0, 1.0]]),
)
def gqa_block_sees_the_future(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, core=everything)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = widen(x)[..., ::2], widen(x)[..., 1::2]
    c, s = widen(cos), widen(sin)
    return torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2).to(x.dtype)


@mutant(
    "gqa_block",
    "P1",
    "Rows are rotated in the interleaved layout.",
    smallest=gqa_rows([[1.0, 0.0, 0.0, 2.0], [0.0, 2.0, 1.0, 0.0]], dim=4),
)
def gqa_block_rotation_of_pairs(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, turn=interleaved)


@mutant(
    "gqa_block",
    "P18",
    "The heads' outputs are joined entry by entry instead of head by head.",
    smallest=gqa_rows([[1.0]], heads=2, kv_heads=2, w_v=1.0),
)
def gqa_block_output_heads_interleaved(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    q = rotate(split(linear(x, w_q), num_heads), cos, sin)
    k = rotate(split(linear(x, w_k), num_kv_heads), cos, sin)
    out = flash_core(q, k, split(linear(x, w_v), num_kv_heads))
    return linear(out.permute(0, 2, 3, 1).flatten(-2), w_o)


def stored(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin).to(torch.float8_e4m3fn).to(x.dtype)


@mutant(
    "gqa_block",
    "P1",
    "q and k are stored in e4m3 after their rotation.",
    dtypes=("fp32", "fp16"),
    smallest=gqa_rows([[1.0, 0.0], [0.0, 17.0 / 16]]),
)
def gqa_block_scores_in_fp8(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, turn=stored)
