"""Eager attention: the formula written with one torch call per step, in the input's dtype and in float32.

`attention` is what model code calls "eager": every intermediate is stored in the input's dtype (contract ``eager``):
raw and scaled scores; with a soft cap their quotient by the cap, its tanh and the product with the cap; the sum with
ALiBi's bias and the additive mask, which are joined in float32; the weights. `attention_fp32` computes in float32 and
rounds once (contract ``fp32``). Both give an LSE, and torch's gradients flow through both. Positions are aligned at the
bottom right; an empty row gives zeros and an LSE of -inf, or the sink.
"""

from __future__ import annotations

import torch

from targets.calling.declare import declare

Tensor = torch.Tensor
Window = tuple[int, int]


def _distance(q: Tensor, k: Tensor) -> Tensor:
    """How far each query stands behind each key [Sq, Sk]; the last ones of both stand at the same place."""
    sq, sk = q.shape[2], k.shape[2]
    rows = torch.arange(sk - sq, sk, device=q.device)
    return rows[:, None] - torch.arange(sk, device=q.device)


def _visible(
    q: Tensor, distance: Tensor, is_causal: bool, window_size: Window | None, attn_mask: Tensor | None
) -> Tensor:
    visible = torch.ones(distance.shape, dtype=torch.bool, device=q.device)
    if is_causal:
        visible = visible & (distance >= 0)
    left, right = (-1, -1) if window_size is None else window_size
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (distance >= -right)
    if attn_mask is not None:
        # A bias of -inf excludes: added, it could not hide a score that overflowed.
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != float("-inf"))
    return visible


def _bias(distance: Tensor, alibi_slopes: Tensor | None, attn_mask: Tensor | None, wide: torch.dtype) -> Tensor | None:
    bias = None
    if alibi_slopes is not None:
        bias = -alibi_slopes.to(wide)[..., None, None] * distance.abs()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        added = attn_mask.masked_fill(attn_mask == float("-inf"), 0.0).to(wide)
        bias = added if bias is None else bias + added
    return bias


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    is_causal: bool,
    attn_mask: Tensor | None,
    window_size: Window | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * factor
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    distance = _distance(q, k)
    bias = _bias(distance, alibi_slopes, attn_mask, wide)
    if bias is not None:
        scores = (scores + bias).to(q.dtype)
    visible = _visible(q, distance, is_causal, window_size, attn_mask)
    scores = scores.masked_fill(~visible, float("-inf"))
    some = visible.any(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores, some = torch.cat((scores, sink), dim=-1), torch.ones_like(some)
    weights = torch.softmax(scores.masked_fill(~some, 0.0), dim=-1).masked_fill(~some, 0.0)
    return weights[..., : k.shape[2]] @ v, torch.logsumexp(scores.to(wide), dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> out [B, Hq, Sq, Dv] (and LSE [B, Hq, Sq], float32).

    alibi_slopes [Hq] or [B, Hq], sinks [Hq]; window_size (left, right), both included, -1 without end.
    """
    out, lse = _attend(q, k, v, scale, is_causal, attn_mask, window_size, softcap, alibi_slopes, sinks)
    return (out, lse) if return_lse else out


def attention_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `attention`, computed in float32 whatever the input's dtype."""
    bias = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.float()
    out, lse = _attend(
        q.float(), k.float(), v.float(), scale, is_causal, bias, window_size, softcap, alibi_slopes, sinks
    )
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


_CONVENTIONS = {"causal_alignment": "bottom_right", "empty_row": "zero", "empty_row_lse": "-inf"}
declare(
    attention,
    {
        "op": "attention",
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "contract": "eager",
        "conventions": _CONVENTIONS,
        "description": "eager attention, every intermediate stored in the input dtype",
    },
)
declare(
    attention_fp32,
    {
        "op": "attention",
        "dtypes": ("fp32", "fp16", "bf16"),
        "contract": "fp32",
        "conventions": _CONVENTIONS,
        "description": "eager attention in float32, rounded once",
    },
)
