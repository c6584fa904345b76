"""A block of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19), from x to the output.

    c^KV = N(W_DKV x),  k^R = R(W_KR x),  c^Q = N'(W_DQ x),  q^C_h = W_UQ,h c^Q,  q^R_h = R(W_QR,h c^Q)
    O_h = the core of `oracle.ops.mla.formula` on q^C_h, q^R_h, c^KV, k^R, W_UK,h, W_UV,h, causal;  y = W_O [O_1 .. O_H]

R is the rotation at each row's position (`oracle.ops.rope.formula`), with frequencies and a magnitude that may be
scaled (`oracle.ops.rope.scaling`). N and N' are RMSNorms, c_i g_i / sqrt(mean c^2 + eps), where the model has them
(DeepSeek's code does, the paper's equations do not), else the identity. The scale defaults to 1/sqrt(d_h + d_r), times
YaRN's (1 + m ln(s)/10)^2 where mscale_all_dim = m is given, as in DeepSeek's code.

Shapes, one sequence: x [r, E] of the queries and [S, E] of the keys, W_DKV [d_c, E], W_KR [d_r, E], W_DQ [d_c', E],
W_UQ [d_h, d_c'], W_QR [d_r, d_c'], W_UK [d_h, d_c] and W_UV [d_v, d_c] per head, W_O [E', H d_v]; y [r, E'].

A decoder keeps c^KV and k^R of earlier rows and nothing else: `latents` makes them, and `from_latents` gives any rows
from them, one by one or all at once, the same real numbers.

Why the enclosures are rigorous: matrix products, a quotient by a square root, rotations and the core, each of which
preserves inclusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.attention.formula import Attended, Visible
from oracle.ops.mla import formula as mla
from oracle.ops.rope import formula as rope


@dataclass(frozen=True, slots=True)
class Norm(Generic[V]):
    """The gain [1, d] and eps [1, 1] of one RMSNorm, and d."""

    gain: V
    eps: V
    width: int


@dataclass(frozen=True, slots=True)
class Weights(Generic[V]):
    """W_DKV, W_KR, W_DQ, W_O, and one per head of W_UK, W_UV, W_UQ, W_QR; the norms where there are any."""

    w_dkv: V
    w_kr: V
    w_dq: V
    w_o: V
    w_uk: list[V]
    w_uv: list[V]
    w_uq: list[V]
    w_qr: list[V]
    norm_kv: Norm[V] | None = None
    norm_q: Norm[V] | None = None


@dataclass(frozen=True, slots=True)
class Side(Generic[V]):
    """Rows of x, their cos and sin [r, d_r / 2], and d_r."""

    x: V
    cos: V
    sin: V
    rotary: int


@dataclass(frozen=True, slots=True)
class Latents(Generic[V]):
    """What a decoder keeps: c^KV [S, d_c] and k^R [S, d_r]."""

    c_kv: V
    k_pe: V


def latents(ar: Arithmetic[V], keys: Side[V], weights: Weights[V], layout: str) -> Latents[V]:
    c_kv = normalised(ar, project(ar, keys.x, weights.w_dkv), weights.norm_kv)
    return Latents(ar.round(c_kv, "cache"), turned(ar, project(ar, keys.x, weights.w_kr), keys, layout))


def from_latents(
    ar: Arithmetic[V],
    queries: Side[V],
    kept: Latents[V],
    weights: Weights[V],
    *,
    scale: V,
    layout: str,
    visible: Visible,
    form: str = "materialised",
    normalise_first: bool = False,
) -> tuple[list[Attended[V]], V]:
    """Every head's attention, and y [r, E'] for the rows of ``queries``."""
    c_q = normalised(ar, project(ar, queries.x, weights.w_dq), weights.norm_q)
    parts = []
    for w_uk, w_uv, w_uq, w_qr in zip(weights.w_uk, weights.w_uv, weights.w_uq, weights.w_qr, strict=True):
        parts.append(
            mla.mla(
                ar,
                project(ar, c_q, w_uq),
                turned(ar, project(ar, c_q, w_qr), queries, layout),
                kept.c_kv,
                kept.k_pe,
                w_uk,
                w_uv,
                scale=scale,
                visible=visible,
                form=form,
                normalise_first=normalise_first,
            )
        )
    joined = ar.round(ar.hstack([part.out for part in parts]), "between")
    return parts, ar.round(ar.matmul(joined, ar.transpose(weights.w_o), "up_accumulator"), "block_output")


def project(ar: Arithmetic[V], x: V, weight: V) -> V:
    """x W^T, stored as what passes between the parts is."""
    return ar.round(ar.matmul(x, ar.transpose(weight), "up_accumulator"), "between")


def normalised(ar: Arithmetic[V], c: V, norm: Norm[V] | None) -> V:
    """RMSNorm of every row (Zhang and Sennrich 2019, arXiv 1910.07467), eps under the root."""
    if norm is None:
        return c
    mean = ar.div(ar.row_sum(ar.mul(c, c), "norm"), ar.rational(norm.width, 1))
    bare = ar.round(ar.div(c, ar.sqrt(ar.add(mean, norm.eps))), "between")
    return ar.round(ar.mul(bare, norm.gain), "between")


def turned(ar: Arithmetic[V], x: V, side: Side[V], layout: str) -> V:
    """Rows [r, d_r], rotated and stored."""
    dim = side.rotary
    pairs = rope.split_pairs(ar, x, dim, layout)
    whole = rope.join_pairs(ar, *rope.turn(ar, *pairs, side.cos, side.sin), dim // 2, layout)
    return ar.round(whole, "between")
