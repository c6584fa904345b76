"""Gradients of scaled dot-product attention, one head (Dao et al. 2022, arXiv 2205.14135, appendix B.2).

With P = exp(S - L) and a cotangent dO of the output O = P v:

    dV = P^T dO,   dP = dO v^T,   D_i = sum_j P_ij dP_ij,   dS = P o (dP - D),
    dX = dS o (1 - (S' / c)^2)  where S' = c tanh(X / c) is a soft cap of X = scale q k^T, else dX = dS,
    dQ = scale dX k,   dK = scale dX^T q,   dBias = dS (dX where the cap comes last),   ds = -sum_i P_is D_i for a sink.

D_i is also dO_i . O_i, which is how flash kernels compute it. Every row of dS, with the sink's entry, sums to 0.

Shapes, one head: as in `oracle.ops.attention.formula`; dO [Sq, Dv], P, dP, dS, dX [Sq, Sk], D [Sq, 1]. A row without
visible keys has P = 0 and gives nothing to any gradient.

Why the enclosures are rigorous: compositions of inclusion-preserving operations on the enclosures of S and L, as in the
forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.attention import formula as attention
from oracle.ops.attention.formula import Attended, Scoring, Visible


@dataclass(frozen=True, slots=True)
class Inner(Generic[V]):
    """What one head's gradients are made of: P, dP, dP - D, dS and dX [r, n], D and the sink's weight [r, 1].

    slope: 1 - (S' / c)^2 where there is a soft cap.
    """

    forward: Attended[V]
    p: V
    dp: V
    delta: V
    centred: V
    ds: V
    dx: V
    sink_weight: V | None
    slope: V | None


@dataclass(frozen=True, slots=True)
class Order:
    """Which of the equal expressions is evaluated: it matters to a model kernel, and to the width of an enclosure.

    delta_from: ``weights`` D = sum_j P dP, which encloses more tightly, or ``output`` D = dO . O. The others: see
    `oracle.ops.attention.formula.attention`.
    """

    delta_from: str = "weights"
    normalise_first: bool = False
    output_stage: str = "output"


PLAIN = Order()


def inner(
    ar: Arithmetic[V],
    q: V,
    k: V,
    v: V,
    do: V,
    *,
    scoring: Scoring[V],
    visible: Visible,
    sink: V | None = None,
    order: Order = PLAIN,
) -> Inner[V]:
    """Everything between the inputs and the gradients, for rows q [r, D], dO [r, Dv] of one head."""
    done = attention.attention(
        ar,
        q,
        k,
        v,
        scoring=scoring,
        visible=visible,
        sink=sink,
        normalise_first=order.normalise_first,
        output_stage=order.output_stage,
    )
    some = np.asarray(visible.any(axis=-1, keepdims=True))
    total = ar.select(some, done.total, ar.rational(1, 1))
    p = ar.round(ar.where(visible, ar.div(done.weights, total)), "probabilities")
    dp = ar.round(ar.matmul(do, ar.transpose(v), "dp_accumulator"), "dp")
    if order.delta_from == "output":
        delta = ar.select(some, ar.row_sum(ar.mul(do, done.out), "delta"), ar.rational(0, 1))
    else:
        delta = ar.row_sum(ar.mul(p, dp), "delta")
    centred = ar.sub(dp, delta)
    ds = ar.where(visible, ar.mul(p, centred))
    dx, slope = ds, None
    if scoring.softcap is not None and done.uncapped is not None:
        t = ar.tanh(ar.div(done.uncapped, scoring.softcap))
        slope = ar.sub(ar.rational(1, 1), ar.mul(t, t))
        dx = ar.where(visible, ar.mul(ds, slope))
    weight = None
    if sink is not None:
        weight = ar.where(some, ar.div(ar.exp(ar.where(some, ar.sub(sink, done.shift))), total))
    return Inner(done, p, dp, delta, centred, ds, ar.round(dx, "ds"), weight, slope)


def dq(ar: Arithmetic[V], x: Inner[V], k: V, scale: V) -> V:
    """[r, D]"""
    return ar.mul(ar.matmul(x.dx, k, "accumulator"), scale)


def dk(ar: Arithmetic[V], x: Inner[V], q: V, scale: V) -> V:
    """[n, D], one query head's share."""
    return ar.mul(ar.matmul(ar.transpose(x.dx), q, "accumulator"), scale)


def dv(ar: Arithmetic[V], x: Inner[V], do: V) -> V:
    """[n, Dv], one query head's share."""
    return ar.matmul(ar.transpose(ar.round(x.p, "weights")), do, "accumulator")


def dsink(ar: Arithmetic[V], x: Inner[V]) -> V:
    """[1, 1]: -sum_i P_is D_i. ValueError without a sink."""
    if x.sink_weight is None:
        raise ValueError("without a sink there is no gradient of one")
    zero = ar.const(np.zeros((1, 1)))
    return ar.sub(zero, ar.row_sum(ar.transpose(ar.mul(x.sink_weight, x.delta)), "delta"))
