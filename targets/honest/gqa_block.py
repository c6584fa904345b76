"""Honest grouped-query attention blocks: projections, half-split rotation, causal attention, output projection.

x `[B, S, E]`, w_q `[H d, E]`, w_k, w_v `[H_kv d, E]`, w_o `[E', H d]`, cos, sin `[S, d/2]` -> `[B, S, E']`. A later row
is no addend of an earlier one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from targets.honest.describe import ALL, describe
from targets.honest.flash import attention as flash
from targets.honest.softmax import widen

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with a float32 sum, in the dtype of x."""
    return (widen(x) @ widen(weight).T).to(x.dtype)


def split(x: Tensor, heads: int) -> Tensor:
    """`[B, S, H d]` to `[B, H, S, d]`."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (i, i + d/2) turned, in float32, rounded once."""
    first, second = widen(x).chunk(2, -1)
    c, s = widen(cos), widen(sin)
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)


def rotate_by_calls(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-x_2, x_1) sin, each call in the dtype of x."""
    first, second = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)


def flash_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash(q, k, v, is_causal=True)
    assert isinstance(out, Tensor)
    return out


def eager_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, scaled scores and weights stored in the input dtype."""
    group = q.shape[1] // k.shape[1]
    keys, values = (a.repeat_interleave(group, 1) for a in (k, v))
    scores = (widen(q) @ widen(keys).mT).to(q.dtype) * (1 / math.sqrt(q.shape[-1]))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.softmax(widen(scores).masked_fill(hidden, -math.inf), -1).to(q.dtype)
    # Column by column, so that a hidden value is never multiplied, not even by zero.
    out = torch.stack([widen(weights[..., i, : i + 1]).unsqueeze(-2) @ widen(values[..., : i + 1, :])
                       for i in range(q.shape[2])], -3)  # fmt: skip
    return out.squeeze(-2).to(q.dtype)


def block(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    *, core: Core = flash_core, turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate,
) -> Tensor:  # fmt: skip
    w_q, w_k, w_v, w_o = weights
    q, k = turn(split(linear(x, w_q), heads), cos, sin), turn(split(linear(x, w_k), kv_heads), cos, sin)
    return linear(core(q, k, split(linear(x, w_v), kv_heads)).transpose(1, 2).flatten(-2), w_o)


@describe("gqa_block", dtypes=ALL)
def gqa_block(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    """Flash attention inside; what passes between the parts is stored in the input dtype."""
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads)


@describe("gqa_block", contract="eager")
def eager(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    """Attention and rotation call by call in the input dtype, as its contract declares."""
    return block(x, (w_q, w_k, w_v, w_o), cos, sin, num_heads, num_kv_heads, core=eager_core, turn=rotate_by_calls)


@describe("gqa_block", contract="fp32")
def in_float32(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, cos: Tensor, sin: Tensor,
    *, num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    """Everything in float32, rounded once at the end, as its contract declares."""
    weights = (w_q.float(), w_k.float(), w_v.float(), w_o.float())
    return block(x.float(), weights, cos.float(), sin.float(), num_heads, num_kv_heads).to(x.dtype)
