"""Attention with every option, and its gradient, in float64 from the definitions: shares nothing with the kernels.

Beside each value stands how far an honest kernel can be from it. The roundings counted, u = 2^-24 (float32 inside)
and U the unit of the inputs' dtype: a product of n terms n u sum |a||b|; a score some sixteen more roundings; an
exponential 2^-22 and eight u of its argument, once per tile of 16 keys that rescales; casts of P, dS and outputs U
each. Terms of second order are covered by a factor.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {torch.float64: 0.0, torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


def wide(tensor: Any) -> Array:
    return np.asarray(tensor.detach().double().numpy(), dtype=np.float64)


@dataclass(frozen=True)
class Dense:
    """One call: [B, Hq, Sq, .] arrays; `u` the unit of the arithmetic, `unit` and `tiny` of the storage.

    raw, s: scores before and after all options (hidden: -inf); tanh of S/c; sink [Hq] or None; rho: relative error
    of the weights.
    """

    q: Array
    k: Array
    v: Array
    alpha: float
    raw: Array
    tanh: Array | None
    visible: NDArray[np.bool_]
    p: Array
    sink_p: Array
    out: Array
    lse: Array
    rho: Array
    u: float
    unit: float
    tiny: float
    kv_heads: int

    def out_bound(self, *, stored: bool = True) -> Array:
        keys = self.v.shape[2]
        unit_p = self.unit if stored and self.unit > self.u else 0.0
        spread = self.p @ np.abs(self.v)
        error = (np.expm1(2 * self.rho) + unit_p + 2 * (keys + 32) * self.u) * (1 + unit_p) * spread
        return np.asarray(error + self.unit * (np.abs(self.out) + error) + (keys + 1) * self.tiny)

    def lse_bound(self) -> Array:
        sums = (self.v.shape[2] + 32) * self.u
        return self.rho[..., 0] + sums + 16 * self.u * np.abs(np.where(np.isinf(self.lse), 0, self.lse)) + 8 * self.u


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    top_left: bool = False,
    stores: int = 0,
) -> Dense:
    """`stores`: how often scores are rounded to the inputs' dtype."""
    unit, tiny = UNIT[q.dtype], HALF_SUBNORMAL[q.dtype]
    u = min(unit, 2.0**-24)
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    q, k, v = wide(q), np.repeat(wide(k), group, axis=1), np.repeat(wide(v), group, axis=1)
    heads, queries, dim = q.shape[1:]
    keys = k.shape[2]
    alpha = 1 / math.sqrt(dim) if scale is None else scale
    raw = alpha * q @ np.swapaxes(k, -1, -2)
    size = abs(alpha) * np.abs(q) @ np.swapaxes(np.abs(k), -1, -2)
    s, tanh, bias_size = raw, None, np.zeros_like(raw)
    if softcap:
        tanh = np.tanh(raw / softcap)
        s = softcap * tanh
    position = np.arange(queries)[:, None] + (0 if top_left else keys - queries)
    col = np.arange(keys)
    if alibi_slopes is not None:
        slopes = wide(alibi_slopes)
        slopes = slopes.reshape(-1, heads)[:, :, None, None]
        bias = slopes * np.abs(position - col)
        s, bias_size = s - bias, bias_size + np.abs(bias)
    visible = np.broadcast_to(np.ones((queries, keys), bool), s.shape).copy()
    if is_causal:
        visible &= col <= position
    if window_size is not None:
        left, right = window_size
        visible &= (col >= position - left) | (left < 0)
        visible &= (col <= position + right) | (right < 0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible &= attn_mask.numpy()
    elif attn_mask is not None:
        bias = wide(attn_mask)
        visible &= bias != -np.inf
        bias = np.where(bias == -np.inf, 0.0, bias)
        s, bias_size = s + bias, bias_size + np.abs(bias)
    scores = np.where(visible, s, -np.inf)
    sink = np.full((heads, 1, 1), -np.inf) if sinks is None else wide(sinks)[:, None, None]
    m = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(np.isinf(m), 0.0, m)
    e = np.exp(scores - m)
    total = e.sum(-1, keepdims=True) + np.exp(sink - m)
    safe = np.where(total == 0, 1.0, total)
    p = e / safe
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    eps = (dim + 8) * u * size + 16 * u * (np.abs(s) + bias_size) + stores * unit * (np.abs(s) + size + bias_size)
    below = np.where(visible, m - np.where(visible, s, 0.0), 0.0)
    worst = np.where(visible, eps, 0.0).max(-1, keepdims=True, initial=0.0)
    rho = np.where(visible, eps + worst + 8 * u * below, 0.0).max(-1, keepdims=True, initial=0.0)
    rho = rho + (-(-keys // 16) + 2) * 4 * u
    if sinks is not None:
        rho = rho + 8 * u * np.maximum(np.abs(sink), m - np.where(np.isinf(sink), m, sink))
    return Dense(
        q, k, v, alpha, raw, tanh, visible, p, np.exp(sink - m) / safe, p @ v, lse, rho, u, unit, tiny, kv_heads
    )  # fmt: skip


def gradients(a: Dense, do: Any) -> dict[str, tuple[Array, Array]]:
    """dq, dk, dv, dbias, dsinks with their bounds, the latter in float64 absolute numbers."""
    do = wide(do)
    keys, rows = a.k.shape[2], a.q.shape[2]
    unit_p = a.unit if a.unit > a.u else 0.0
    swapped = np.swapaxes(a.v, -1, -2)
    dp, dp_size = do @ swapped, np.abs(do) @ np.abs(swapped)
    delta = (do * a.out).sum(-1, keepdims=True)
    delta_error = (np.abs(do) * (a.out_bound() + (a.v.shape[3] + 2) * a.u * np.abs(a.out))).sum(-1, keepdims=True)
    damp = 1.0 if a.tanh is None else 1 - a.tanh**2
    ds = a.p * (dp - delta) * damp
    p_error = np.expm1(3 * a.rho) + 8 * a.u * np.abs(np.where(np.isinf(a.lse), 0, a.lse))[..., None]
    s = a.p * (
        p_error * np.abs(dp - delta) + (a.v.shape[3] + 2) * a.u * dp_size + delta_error + 4 * a.u * np.abs(delta)
    )
    bias_error = s * 1.01 + 2.0**-140
    # 1 - t^2 has the absolute error 2|t| times that of t, which is also the score's error over c.
    s = s + (0.0 if a.tanh is None else a.p * np.abs(dp - delta) * (2 * np.expm1(a.rho) + 16 * a.u))
    s = s + unit_p * (np.abs(ds) + s) + a.tiny

    def to_kv(x: Array) -> Array:
        batch, heads = x.shape[:2]
        return np.asarray(x.reshape(batch, a.kv_heads, heads // a.kv_heads, *x.shape[2:]).sum(2))

    def product(weights: Array, errors: Array, other: Array, terms: int) -> Array:
        inner = errors + (terms + 8) * a.u * (np.abs(weights) + errors)
        return np.asarray(inner @ np.abs(other))

    def stored(value: Array, error: Array) -> tuple[Array, Array]:
        return value, error * 1.01 + a.unit * (np.abs(value) + error) + a.tiny

    group = a.q.shape[1] // a.kv_heads
    turned, turned_s = np.swapaxes(ds, -1, -2), np.swapaxes(s, -1, -2)
    weights = np.swapaxes(a.p, -1, -2)
    weight_error = np.swapaxes((p_error + unit_p) * a.p + a.tiny, -1, -2)
    sink_error = a.sink_p * ((p_error + (rows * a.q.shape[0] + 8) * a.u) * np.abs(delta) + delta_error)
    return {
        "dq": stored(a.alpha * ds @ a.k, a.alpha * product(ds, s, a.k, keys)),
        "dk": stored(to_kv(a.alpha * turned @ a.q), to_kv(a.alpha * product(turned, turned_s, a.q, rows * group))),
        "dv": stored(to_kv(weights @ do), to_kv(product(weights, weight_error, do, rows * group))),
        # Of the scores after their cap, with every axis; kept in float32.
        "dbias": (a.p * (dp - delta), bias_error),
        "dsinks": (-(a.sink_p * delta).sum((0, 2, 3)), sink_error.sum((0, 2, 3)) + 2.0**-140),
    }
