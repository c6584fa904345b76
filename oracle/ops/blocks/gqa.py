"""A grouped-query attention block (Ainslie et al. 2023, arXiv 2305.13245), from x to the output projection.

    q = R(x W_Q^T),  k = R(x W_K^T),  v = x W_V^T  per head;  O_h = softmax(q_h k_g^T / sqrt(d)) v_g, causal, g the
    head's KV head h // (H / H_kv);  y = [O_1 .. O_H] W_O^T

R turns the pairs (i, i + d/2) of a row by the given cos and sin (the half-split layout of GPT-NeoX and Llama).

Shapes, one sequence: x [r, E] of the queries and [S, E] of the keys, W_Q [H d, E], W_K, W_V [H_kv d, E], W_O [E', H d]
(torch's Linear weights, without bias), cos and sin [S, d/2]; O_h [r, d], y [r, E'].

Why the enclosures are rigorous: matrix products, `oracle.ops.rope.formula.turn` and
`oracle.ops.attention.formula.attention`, each of which preserves inclusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.attention import formula as attention
from oracle.ops.attention.formula import Attended, Scoring, Visible
from oracle.ops.rope import formula as rope


@dataclass(frozen=True, slots=True)
class Weights(Generic[V]):
    """W_Q, W_K, W_V, W_O as torch's Linear has them: [out, in]."""

    w_q: V
    w_k: V
    w_v: V
    w_o: V


@dataclass(frozen=True, slots=True)
class Side(Generic[V]):
    """Rows of x and of the tables: those of the queries, or those of the keys."""

    x: V
    cos: V
    sin: V


def gqa_block(
    ar: Arithmetic[V],
    queries: Side[V],
    keys: Side[V],
    weights: Weights[V],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    visible: Visible,
    normalise_first: bool = False,
) -> tuple[list[Attended[V]], V]:
    """Every head's attention, and y [r, E']."""
    scoring = Scoring(attention.default_scale(ar, dim))
    q = project(ar, queries.x, weights.w_q)
    k, v = project(ar, keys.x, weights.w_k), project(ar, keys.x, weights.w_v)
    turned_k = [turned(ar, ar.columns(k, g * dim, (g + 1) * dim), keys, dim) for g in range(kv_heads)]
    parts = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        parts.append(
            attention.attention(
                ar,
                turned(ar, ar.columns(q, h * dim, (h + 1) * dim), queries, dim),
                turned_k[g],
                ar.columns(v, g * dim, (g + 1) * dim),
                scoring=scoring,
                visible=visible,
                normalise_first=normalise_first,
                output_stage="heads",
            )
        )
    joined = ar.hstack([part.out for part in parts])
    return parts, ar.round(ar.matmul(joined, ar.transpose(weights.w_o), "up_accumulator"), "output")


def project(ar: Arithmetic[V], x: V, weight: V) -> V:
    """x W^T, stored as projections are."""
    return ar.round(ar.matmul(x, ar.transpose(weight), "up_accumulator"), "up")


def turned(ar: Arithmetic[V], x: V, side: Side[V], dim: int) -> V:
    """One head's rows [S, d], rotated and stored."""
    pairs = rope.split_pairs(ar, x, dim, "half")
    return ar.round(rope.join_pairs(ar, *rope.turn(ar, *pairs, side.cos, side.sin), dim // 2, "half"), "up")
