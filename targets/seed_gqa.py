"""Grouped-query attention as a PyTorch module: projections, half-split rotation, causal SDPA, output projection.

Written from the formulas of Ainslie et al. (arXiv 2305.13245) and of the half-split RoPE. `attention` is the module's
core, called
as a target: KV heads repeated to the query heads, then torch's SDPA. The math backend is asked for: the CPU flash
backend turns a NaN in a query into zeros (pytorch/pytorch#141128), and the module's formula does not.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

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


attention.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "attention",
    "dtypes": ("fp32", "fp16", "bf16"),
    "conventions": {"causal_alignment": "top_left"},
    "description": "grouped-query attention module's core over torch SDPA",
}
