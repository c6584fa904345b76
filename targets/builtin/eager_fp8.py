"""Attention of 8-bit inputs in torch, as 8-bit kernels compute it, call by call (FlashAttention-3, arXiv 2407.08608).

q, k and v are e4m3 or e5m2 with float32 factors by sequence and KV head, multiplied into the scores and the output.
Products sum in float32, where 8-bit numbers are exact; weights exp(S - m), at most 1, are multiplied by 256, a power of
two below e4m3's largest number, and rounded to e4m3 for the product with v, so that small ones keep their digits; their
sum adds them unrounded. The output is bfloat16. Positions are aligned at the bottom right; an empty row gives zeros and
an LSE of -inf.
"""

from __future__ import annotations

import torch

from targets.calling.declare import declare

Tensor = torch.Tensor
WEIGHT_SCALE = 256.0


def _by_query_head(factor: Tensor | None, heads: int) -> Tensor | float:
    """[B, Hkv] as [B, Hq, 1, 1]; 1 without a factor."""
    if factor is None:
        return 1.0
    return factor.float().repeat_interleave(heads // factor.shape[1], dim=1)[..., None, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], 8 bits -> out [B, Hq, Sq, Dv], bfloat16 (LSE: float32).

    q_descale, k_descale, v_descale [B, Hkv], float32: what is attended to is q times its factor, and so on.
    """
    heads, (sq, sk) = q.shape[1], (q.shape[2], k.shape[2])
    wide_q, wide_k, wide_v = q.float(), *(x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    # One factor after the other: their product alone could leave float32's range.
    scores = (wide_q @ wide_k.mT) * factor * _by_query_head(q_descale, heads) * _by_query_head(k_descale, heads)
    visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if is_causal:
        visible = visible.tril(sk - sq)
    some = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.amax(-1, keepdim=True).masked_fill(~some, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    cast = (weights * WEIGHT_SCALE).to(torch.float8_e4m3fn).float()
    out = (cast @ wide_v) / (total.masked_fill(~some, 1.0) * WEIGHT_SCALE) * _by_query_head(v_descale, heads)
    lse = (top + total.log()).squeeze(-1)
    return (out.to(torch.bfloat16), lse) if return_lse else out.to(torch.bfloat16)


declare(
    attention,
    {
        "op": "attention",
        "dtypes": ("e4m3", "e5m2"),
        "contract": {"preset": "flash", "weights": "e4m3", "weight_scale": WEIGHT_SCALE, "output": "bf16"},
        "conventions": {"causal_alignment": "bottom_right", "empty_row": "zero", "empty_row_lse": "-inf"},
        "gradients": False,
        "description": "8-bit inputs with factors, P in e4m3 times 256, sums in float32",
    },
)
