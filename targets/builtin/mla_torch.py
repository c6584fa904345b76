"""Multi-head latent attention in torch, one call per step, in the inputs' dtype (arXiv 2405.04434, section 2.1).

`mla_materialised` builds every head's keys and values from the latents, as training and prefill code does;
`mla_absorbed` moves W_UK to the query and W_UV to the output, so that decoding reads nothing but the latents
and the shared rotary key. In both, the content and the rotary part of a score are one dot product over
concatenated vectors, as in transformers' DeepSeek models and in decoding kernels with a head of d_c + d_r.

Where precision is decided: everything between two calls is stored in the inputs' dtype (k^C and v, or q~ and
the latent sum; raw scores, scaled scores, normalised weights), each product sums in float32 and rounds its
result once, softmax runs in float32. That is the contract ``eager`` with ``up`` and ``latent`` stored.
`_product` asks for float32 explicitly: torch's own 16-bit products on a CPU were measured to round the same
way, but from 64 x 64 x 64 on those with bfloat16 instructions read subnormal inputs as zero. Causal alignment
is bottom_right; an empty row gives zeros and an LSE of -inf.
"""

from __future__ import annotations

from typing import Any

import torch

from oracle.ops.mla.formula import DEEPSEEK_V2, DEEPSEEK_V3, Dimensions
from targets.calling.declare import declare

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "Dimensions", "mla_absorbed", "mla_materialised"]

Tensor = torch.Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in float32 (float64 for float64), stored in the dtype of ``a``."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, default_scale: float, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """q [B, H, Sq, D], k and v [B, H or 1, Sk, D or Dv] -> (O [B, H, Sq, Dv], L [B, H, Sq] float32)."""
    scores = _product(q, k.transpose(-1, -2)) * (default_scale if scale is None else scale)
    sq, sk = scores.shape[-2:]
    visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if is_causal:
        visible = visible.tril(sk - sq)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~visible, float("-inf"))
    some = visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~some, 0.0), dim=-1).masked_fill(~some, 0.0)
    return _product(weights.to(q.dtype), v), torch.logsumexp(scores, dim=-1)


def mla_materialised(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Any:
    """q_nope [B, H, Sq, d_h], q_pe [B, H, Sq, d_r], c_kv [B, Sk, d_c], k_pe [B, Sk, d_r],
    w_uk [H, d_h, d_c], w_uv [H, d_v, d_c].

    Returns out [B, H, Sq, d_v] in the inputs' dtype, and with `return_lse` also ln sum e^S, float32 [B, H,
    Sq]. `scale` defaults to 1/sqrt(d_h + d_r).
    """
    latents = c_kv.unsqueeze(1)
    k_nope = _product(latents, w_uk.transpose(-1, -2))
    v = _product(latents, w_uv.transpose(-1, -2))
    k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, w_uk.shape[0], -1, -1)], dim=-1)
    q = torch.cat([q_nope, q_pe], dim=-1)
    out, lse = _attend(q, k, v, q.shape[-1] ** -0.5, scale, is_causal)
    return (out, lse) if return_lse else out


def mla_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Any:
    """As `mla_materialised`, without keys and values per head: latents are attended to as they are cached."""
    q = torch.cat([_product(q_nope, w_uk), q_pe], dim=-1)
    k = torch.cat([c_kv, k_pe], dim=-1).unsqueeze(1)
    default_scale = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5
    latent, lse = _attend(q, k, c_kv.unsqueeze(1), default_scale, scale, is_causal)
    out = _product(latent, w_uv.transpose(-1, -2))
    return (out, lse) if return_lse else out


_SHARED: dict[str, Any] = {
    "op": "mla",
    "dtypes": ("fp32", "fp16", "bf16"),
    "devices": ("cpu", "cuda"),
    "conventions": {
        "causal_alignment": "bottom_right",
        "lse_base": "e",
        "empty_row": "zero",
        "empty_row_lse": "-inf",
        "masked_nan": "leaks",
    },
    "framework": "torch",
}
declare(
    mla_materialised,
    {
        **_SHARED,
        "contract": {"preset": "eager", "form": "materialised", "up": "input", "latent": "input"},
        "description": "MLA with keys and values built per head, every step stored in the input dtype",
    },
)
declare(
    mla_absorbed,
    {
        **_SHARED,
        "contract": {"preset": "eager", "form": "absorbed", "up": "input", "latent": "input"},
        "description": "MLA with projections absorbed into query and output, every step stored in the input dtype",
    },
)
