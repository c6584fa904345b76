"""Whole blocks, call by call."""

import math
from typing import Any

import mpmath
import numpy as np

from meta_tests.kernels.plain.exact import Array, Exact, wide
from meta_tests.kernels.plain.rope import turn
from meta_tests.witnesses import rope as rope_witness


def gqa_block(
    x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, cos: Any, sin: Any, *, num_heads: int, num_kv_heads: int
) -> list[Exact]:
    x, w_q, w_k, w_v, w_o, cos, sin = (wide(a) for a in (x, w_q, w_k, w_v, w_o, cos, sin))
    dim = len(w_q) // num_heads
    q, k, v = (np.einsum("bse,oe->bso", x, w) for w in (w_q, w_k, w_v))
    sizes = [np.einsum("bse,oe->bso", np.abs(x), np.abs(w)) for w in (w_q, w_k, w_v)]

    def turned(a: Array, head: int) -> Array:
        first, second = a[..., head * dim : head * dim + dim // 2], a[..., head * dim + dim // 2 : (head + 1) * dim]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = np.triu(np.ones((x.shape[1], x.shape[1]), dtype=bool), 1)
    outs, spreads = [], []
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        query, key, value = turned(q, h), turned(k, g), v[..., g * dim : (g + 1) * dim]
        s = np.where(hidden, -np.inf, np.einsum("bid,bjd->bij", query, key) / math.sqrt(dim))
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        outs.append(p @ value)
        # Scores err by roundings of every stored factor, values by their own.
        most = (np.abs(sizes[0]).max() * np.abs(sizes[1]).max()) * math.sqrt(dim)
        spreads.append((8 + 8 * most) * (p @ sizes[2][..., g * dim : (g + 1) * dim]))
    y = np.concatenate(outs, -1) @ w_o.T
    size = np.concatenate(spreads, -1) @ np.abs(w_o).T
    return [Exact(y, np.abs(y) + size, (x.shape[-1] + len(w_q) + x.shape[1] + 20) * size)]


def mla_block(
    x: Any, positions: Any, w_dkv: Any, w_uk: Any, w_uv: Any, w_kr: Any, w_dq: Any, w_uq: Any, w_qr: Any, w_o: Any,
    *, base: float = 10000.0, layout: str = "half", scale: float | None = None, norm_kv: Any = None,
    norm_q: Any = None, eps: float = 1e-6, scaling: Any = None,
) -> list[Exact]:  # fmt: skip
    x, w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o = (
        wide(a) for a in (x, w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o)
    )
    d_h, d_r = w_uk.shape[1], len(w_kr)
    length = int(positions.max()) + 1
    with mpmath.workprec(80):
        theta = np.array([float(rope_witness.frequency(i, d_r, base, scaling, length)) for i in range(d_r // 2)])
        magnitude = float(rope_witness.size(scaling))
    angle = np.broadcast_to(positions.numpy()[..., None] * theta, (*x.shape[:2], d_r // 2))
    tempered = 1.0
    if scaling is not None and scaling.get("mscale_all_dim"):
        tempered += 0.1 * scaling["mscale_all_dim"] * math.log(max(scaling["factor"], 1.0))
    alpha = tempered**2 * (d_h + d_r) ** -0.5 if scale is None else scale

    def norm(c: Array, gain: Any) -> Array:
        return c if gain is None else c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * wide(gain)

    def turned(a: Array) -> Array:
        return turn(a, magnitude * np.cos(angle), magnitude * np.sin(angle), np.zeros(angle.shape), layout).value

    c_kv, c_q = norm(x @ w_dkv.T, norm_kv), norm(x @ w_dq.T, norm_q)
    k_pe = turned(x @ w_kr.T)
    hidden = np.triu(np.ones((x.shape[1], x.shape[1]), dtype=bool), 1)
    outs, spreads = [], []
    for uk, uv, uq, qr in zip(w_uk, w_uv, w_uq, w_qr, strict=True):
        nope, rope_part = c_q @ uq.T, turned(c_q @ qr.T)
        s = np.einsum("bid,bjd->bij", nope, c_kv @ uk.T) + np.einsum("bid,bjd->bij", rope_part, k_pe)
        s = np.where(hidden, -np.inf, alpha * s)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        outs.append(p @ (c_kv @ uv.T))
        # Scores err by roundings of every stored factor, values by their own.
        most = [np.abs(a).max() for a in (c_q, c_kv, k_pe)]
        size = alpha * (d_h * np.abs(uk).sum(1).max() * most[1] + d_r * most[2]) * most[0]
        size *= max(np.abs(uq).sum(1).max(), np.abs(qr).sum(1).max())
        spreads.append((10 + 16 * size) * (p @ (np.abs(c_kv) @ np.abs(uv).T)))
    y = np.concatenate(outs, -1) @ w_o.T
    size = np.concatenate(spreads, -1) @ np.abs(w_o).T
    turns = 20 * np.abs(angle).max()
    return [Exact(y, np.abs(y) + size, (x.shape[-1] + c_kv.shape[-1] + x.shape[1] + 40 + turns) * size)]
