"""Grouped-query attention as a PyTorch module: projections, half-split rotation, causal SDPA, output projection.

Written from the formulas of Ainslie et al. (arXiv 2305.13245) and of the half-split RoPE. `gqa_block` is the module as
a function of its weights; `attention` is its core, called as a target: KV heads repeated to the query heads, then
torch's SDPA. The math backend is asked for: the CPU flash backend turns a NaN in a query into zeros
(pytorch/pytorch#141128), and the module's formula does not.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from targets.calling.declare import declare

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., S, D] rotated by tables cos, sin [S, D], halves paired."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
) -> Tensor:
    """q [B, Hq, S, D], k, v [B, Hkv, S, D] -> [B, Hq, S, D]; query head h reads KV head h // (Hq / Hkv)."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(q, keys, values, is_causal=is_causal)


def gqa_block(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """The whole module as a function: x [B, S, E], w_q [Hq d, E], w_k, w_v [Hkv d, E], w_o [E, Hq d] -> [B, S, E].

    cos, sin [S, d/2] rotate pairs (i, i + d/2) of q and k; attention is causal. Every step is stored in x's dtype.
    """
    width = w_q.shape[0] // num_heads
    tables = [torch.cat((table, table), dim=-1) for table in (cos, sin)]

    def heads(weight: Tensor, count: int) -> Tensor:
        y = linear(x, weight)
        return y.reshape(*y.shape[:-1], count, width).transpose(1, 2)

    q = rotate(heads(w_q, num_heads), *tables).to(x.dtype)
    k = rotate(heads(w_k, num_kv_heads), *tables).to(x.dtype)
    out = attention(q, k, heads(w_v, num_kv_heads), is_causal=True)
    return linear(out.transpose(1, 2).flatten(-2), w_o)


class GroupedQueryAttention(nn.Module):
    """x [B, S, d_model], tables cos, sin [S, d_head] -> [B, S, d_model], causal."""

    def __init__(self, *, d_model: int, num_heads: int, num_kv_heads: int, d_head: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = num_heads, num_kv_heads, d_head
        self.to_q = nn.Linear(d_model, num_heads * d_head, bias=False)
        self.to_k = nn.Linear(d_model, num_kv_heads * d_head, bias=False)
        self.to_v = nn.Linear(d_model, num_kv_heads * d_head, bias=False)
        self.to_out = nn.Linear(num_heads * d_head, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.reshape(*y.shape[:-1], heads, self.width).transpose(1, 2)

        q = rotate(split(self.to_q(x), self.heads), cos, sin)
        k = rotate(split(self.to_k(x), self.kv_heads), cos, sin)
        out = attention(q, k, split(self.to_v(x), self.kv_heads), is_causal=True)
        return self.to_out(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


declare(
    attention,
    {
        "op": "attention",
        "dtypes": ("fp32", "fp16", "bf16"),
        "conventions": {"causal_alignment": "top_left"},
        "description": "grouped-query attention module's core over torch SDPA",
    },
)
declare(
    gqa_block,
    {
        "op": "gqa_block",
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "description": "grouped-query attention module: projections, rotation, causal torch SDPA, output projection",
    },
)
