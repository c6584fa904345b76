"""Gradients of the core of multi-head latent attention, materialised: one head, and the sums over heads.

With k^C = W_UK c, v = W_UV c, q = [q^C, q^R], k = [k^C, k^R] and the gradients dq, dk, dv of plain attention
(`oracle.ops.attention_backward`) for a cotangent dO [Sq, d_v] of every head's output:

    [dq^C, dq^R] = dq,   [dk^C, dk^R] = dk,   dc = sum_h (dk^C_h W_UK,h + dv_h W_UV,h),   dk^R = sum_h dk^R_h,
    dW_UK,h = sum_b dk^C_h^T c,   dW_UV,h = sum_b dv_h^T c

Shapes, one head: as in `oracle.ops.mla`. The absorbed order has the same gradients: it is the same real function.

Why the enclosures are rigorous: compositions of inclusion-preserving operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from oracle.arithmetic.base import Arithmetic, Value
from oracle.ops import attention_backward as backward
from oracle.ops import mla
from oracle.ops.attention import Scoring, Visible
from oracle.ops.attention_backward import Inner


@dataclass(frozen=True, slots=True)
class HeadGradients:
    """Of one head: the inner parts of attention, dq [r, d_h + d_r], dk [n, d_h + d_r], dv [n, d_v]."""

    inner: Inner
    dq: Value
    dk: Value
    dv: Value


def head_gradients(
    ar: Arithmetic,
    q_nope: Value,
    q_pe: Value,
    c_kv: Value,
    k_pe: Value,
    w_uk: Value,
    w_uv: Value,
    do: Value,
    *,
    scale: Value,
    visible: Visible,
) -> HeadGradients:
    q, k, v = mla.operands(ar, q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, form="materialised")
    inner = backward.inner(ar, q, k, v, do, scoring=Scoring(scale), visible=visible)
    dk = ar.round(backward.dk(ar, inner, q, scale), "up")
    return HeadGradients(inner, backward.dq(ar, inner, k, scale), dk, ar.round(backward.dv(ar, inner, do), "up"))


def latent_gradient(ar: Arithmetic, dk_nope: Value, dv: Value, w_uk: Value, w_uv: Value) -> Value:
    """One head's share of dc [n, d_c]."""
    return ar.add(ar.matmul(dk_nope, w_uk, "up_accumulator"), ar.matmul(dv, w_uv, "up_accumulator"))


def weight_gradient(ar: Arithmetic, up: Value, c_kv: Value) -> Value:
    """One sequence's share of dW [d, d_c] from the gradient of what W made of c."""
    return ar.matmul(ar.transpose(up), c_kv, "up_accumulator")
