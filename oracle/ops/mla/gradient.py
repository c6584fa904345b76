"""Gradients of the core of multi-head latent attention: one head, and its shares of the sums over heads.

Materialised, with k^C = W_UK c, v = W_UV c, q = [q^C, q^R], k = [k^C, k^R] and the gradients dq, dk, dv of plain
attention (`oracle.ops.attention.gradient`) for a cotangent dO [Sq, d_v] of every head's output:

    [dq^C, dq^R] = dq,   [dk^C, dk^R] = dk,   dc = sum_h (dk^C_h W_UK,h + dv_h W_UV,h),   dk^R = sum_h dk^R_h,
    dW_UK,h = sum_b dk^C_h^T c,   dW_UV,h = sum_b dv_h^T c

Absorbed, with q~ = q^C W_UK, z = P c, dz = dO W_UV and the gradients dq, dk, dv of plain attention of [q~, q^R] to
[c, k^R] and values c, for the cotangent dz:

    [dq~, dq^R] = dq,   dq^C = dq~ W_UK^T,   [dc', dk^R] = dk,   dc = sum_h (dc'_h + dv_h),   dk^R = sum_h dk^R_h,
    dW_UK,h = sum_b q^C_h^T dq~_h,   dW_UV,h = sum_b dO_h^T z_h

Both are the chain rule on the same real function. Shapes, one head: as in `oracle.ops.mla.formula`; z, dz [Sq, d_c].

Why the enclosures are rigorous: compositions of inclusion-preserving operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np

from oracle.arithmetic.base import Arithmetic, V
from oracle.ops.attention import gradient as backward
from oracle.ops.attention.formula import Scoring, Visible
from oracle.ops.attention.gradient import PLAIN, Inner, Order
from oracle.ops.mla import formula as mla


@dataclass(frozen=True, slots=True)
class HeadInputs(Generic[V]):
    """One head's inputs as values of an arithmetic, and the cotangent of its output."""

    q_nope: V
    q_pe: V
    c_kv: V
    k_pe: V
    w_uk: V
    w_uv: V
    do: V


@dataclass(frozen=True, slots=True)
class Widths:
    """d_h, d_r and d_c."""

    head: int
    rope: int
    latent: int


@dataclass(frozen=True, slots=True)
class HeadGradients(Generic[V]):
    """Of one head: the inner parts of attention, and what it adds to every sum.

    dq_nope [r, d_h], dq_pe [r, d_r], dk_pe [n, d_r]; through_keys, through_values: what dc and the weights' gradients
    are made of: dk^C [n, d_h] and dv [n, d_v] materialised; dc' and dv [n, d_c] absorbed. dq_latent, latent [r, d_c]:
    dq~ and z (0 in a row without keys), absorbed only.
    """

    form: str
    inner: Inner[V]
    dq_nope: V
    dq_pe: V
    dk_pe: V
    through_keys: V
    through_values: V
    dq_latent: V | None = None
    latent: V | None = None


def head_gradients(
    ar: Arithmetic[V],
    x: HeadInputs[V],
    widths: Widths,
    *,
    scale: V,
    visible: Visible,
    form: str = "materialised",
    order: Order = PLAIN,
) -> HeadGradients[V]:
    q, k, v = mla.operands(ar, x.q_nope, x.q_pe, x.c_kv, x.k_pe, x.w_uk, x.w_uv, form=form)
    absorbed = form == "absorbed"
    do = ar.round(ar.matmul(x.do, x.w_uv, "up_accumulator"), "latent") if absorbed else x.do
    inner = backward.inner(ar, q, k, v, do, scoring=Scoring(scale), visible=visible, order=order)
    dq, dk = backward.dq(ar, inner, k, scale), backward.dk(ar, inner, q, scale)
    own = widths.latent if absorbed else widths.head
    dq_own, dq_pe = ar.columns(dq, 0, own), ar.columns(dq, own, own + widths.rope)
    dk_own, dk_pe = ar.columns(dk, 0, own), ar.columns(dk, own, own + widths.rope)
    dv = backward.dv(ar, inner, do)
    if not absorbed:
        return HeadGradients(form, inner, dq_own, dq_pe, dk_pe, ar.round(dk_own, "up"), ar.round(dv, "up"))
    dq_latent = ar.round(dq_own, "up")
    dq_nope = ar.matmul(dq_latent, ar.transpose(x.w_uk), "up_accumulator")
    some = np.asarray(visible.any(axis=1, keepdims=True))
    z = ar.select(some, inner.forward.out, ar.rational(0, 1))
    return HeadGradients(form, inner, dq_nope, dq_pe, dk_pe, dk_own, dv, dq_latent, z)


def latent_gradient(ar: Arithmetic[V], made: HeadGradients[V], x: HeadInputs[V]) -> V:
    """One head's share of dc [n, d_c]."""
    if made.form == "absorbed":
        return ar.add(made.through_keys, made.through_values)
    of_keys = ar.matmul(made.through_keys, x.w_uk, "up_accumulator")
    return ar.add(of_keys, ar.matmul(made.through_values, x.w_uv, "up_accumulator"))


def key_weight_gradient(ar: Arithmetic[V], made: HeadGradients[V], x: HeadInputs[V]) -> V:
    """One sequence's share of dW_UK [d_h, d_c]."""
    if made.dq_latent is not None:
        return ar.matmul(ar.transpose(x.q_nope), made.dq_latent, "up_accumulator")
    return ar.matmul(ar.transpose(made.through_keys), x.c_kv, "up_accumulator")


def value_weight_gradient(ar: Arithmetic[V], made: HeadGradients[V], x: HeadInputs[V]) -> V:
    """One sequence's share of dW_UV [d_v, d_c]."""
    if made.latent is not None:
        return ar.matmul(ar.transpose(x.do), made.latent, "up_accumulator")
    return ar.matmul(ar.transpose(made.through_values), x.c_kv, "up_accumulator")
