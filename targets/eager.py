"""Eager attention: the formula written with one torch call per step, in the input's dtype and in float32.

`attention` is what model code calls "eager": every intermediate is stored in the input's dtype (contract ``eager``).
`attention_fp32` computes in float32 and rounds once (contract ``fp32``). Both give an LSE. Causal alignment is
bottom_right; an empty row gives zeros and an LSE of -inf.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def _visible(q: Tensor, k: Tensor, is_causal: bool, attn_mask: Tensor | None) -> Tensor:
    sq, sk = q.shape[2], k.shape[2]
    visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if is_causal:
        visible = visible.tril(sk - sq)
    if attn_mask is not None:
        # A bias of -inf excludes: added, it could not hide a score that overflowed.
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != float("-inf"))
    return visible


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * factor
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.masked_fill(attn_mask == float("-inf"), 0.0)
    visible = _visible(q, k, is_causal, attn_mask)
    scores = scores.masked_fill(~visible, float("-inf"))
    some = visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~some, 0.0), dim=-1).masked_fill(~some, 0.0)
    return weights @ v, torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> out [B, Hq, Sq, Dv] (and LSE [B, Hq, Sq], float32)."""
    out, lse = _attend(q, k, v, scale, is_causal, attn_mask)
    return (out, lse) if return_lse else out


def attention_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """As `attention`, computed in float32 whatever the input's dtype."""
    bias = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.float()
    out, lse = _attend(q.float(), k.float(), v.float(), scale, is_causal, bias)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


_CONVENTIONS = {"causal_alignment": "bottom_right", "empty_row": "zero", "empty_row_lse": "-inf"}
attention.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "attention",
    "dtypes": ("fp64", "fp32", "fp16", "bf16"),
    "contract": "eager",
    "conventions": _CONVENTIONS,
    "description": "eager attention, every intermediate stored in the input dtype",
}
attention_fp32.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "attention",
    "dtypes": ("fp32", "fp16", "bf16"),
    "contract": "fp32",
    "conventions": _CONVENTIONS,
    "description": "eager attention in float32, rounded once",
}
