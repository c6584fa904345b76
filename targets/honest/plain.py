"""Attention as it is written first, in the usual styles: correct, without a statement, each with limits of its own.

What each does with rows that see no key, which heads, masks and slopes it takes, is found by probes. All compute in
float32 but those that say so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout, softmax

from targets.calling.declare import declare

_HIDDEN = float("-inf")


def matmul_softmax(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """A causal mask aligned at the end, whose rows without a key are NaN; equal heads only."""
    scores = torch.matmul(q.float(), k.float().transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if is_causal:
        rows, keys = scores.shape[-2:]
        later = torch.triu(torch.ones(rows, keys, dtype=torch.bool), diagonal=keys - rows + 1)
        scores = scores.masked_fill(later, _HIDDEN)
    return torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(q.dtype)


def boolean_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Hides by the smallest float: a row without a key is the mean of V. No additive masks."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v.float()).to(q.dtype)


def additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Adds whatever mask it gets, as models do that make their masks themselves."""
    scores = q.float() @ k.float().transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.float()
    weights: Tensor = softmax(scores, dim=-1)
    return (weights @ v.float()).to(q.dtype)


def alibi(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Slopes [Hq] alone."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.float()[None, :, None, None] * distance.abs()
    if is_causal:
        scores = scores.masked_fill(distance < 0, _HIDDEN)
    out: Tensor = scores.softmax(-1) @ v.float()
    return out.to(q.dtype)


def exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax by hand, divided at the end; Dv like D is nobody's business."""
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)


def repeated_heads(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """KV heads repeated, a causal mask aligned at the start."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1).float(), v.repeat_interleave(group, dim=1).float()
    scores = q.float() @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], _HIDDEN).triu(1)
    return (scores.softmax(dim=-1) @ v).to(q.dtype)


def grouped_view(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Heads [B, Hkv, G, S, D], a sink as one more column, dropped after the softmax."""
    batch, heads, rows, width = q.shape
    q5 = q.float().view(batch, k.shape[1], heads // k.shape[1], rows, width)
    scores = q5 @ k.float()[:, :, None].mT * width**-0.5
    if sinks is not None:
        column = sinks.float().view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()[:, :, None]).reshape(batch, heads, rows, -1).to(q.dtype)


def key_by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A running maximum and sum over tiles of eight keys."""
    high = torch.full((*q.shape[:3], 1), _HIDDEN)
    total = torch.zeros_like(high)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, k.shape[2], 8):
        keys, values = k[:, :, start : start + 8].float(), v[:, :, start : start + 8].float()
        scores = q.float() @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5
        above = torch.maximum(high, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - above), torch.exp(high - above)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out, high = out * shrink + weights @ values, above
    return (out / total).to(q.dtype)


def in_the_input_dtype(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Every call stored in the dtype of the inputs, as its contract says; dropout never used."""
    weights = softmax(query @ key.transpose(-2, -1) / math.sqrt(query.size(-1)), dim=-1)
    mixed: Tensor = dropout(weights, dropout_p) @ value
    return mixed


def scaled_query(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """The scale goes to the query, in float32."""
    scaled = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(torch.einsum("bhsd,bhtd->bhst", scaled, k.float()), dim=-1)
    return torch.einsum("bhst,bhtd->bhsd", weights, v.float()).to(q.dtype)


declare(additive_mask, {"conventions": {"boolean_mask": "refused"}})
declare(in_the_input_dtype, {"contract": "eager"})
