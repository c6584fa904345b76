"""The way back through softmax: y as the forward pass stored it, the cotangent dy, one row at a time.

    dx_i = y_i (dy_i - D),  D = sum_j y_j dy_j

y is an argument like any other, exact as stored: nothing asks that it sums to 1. `of_log` is the same for ln p, where
the row's derivative is dy_i - p_i sum_j dy_j.

Shapes: y, p, dy [R, n]; D [R, 1]. Source: the derivative of exp(x_i) / sum exp(x_j); `torch.softmax` computes its
gradient from the stored output in this form. Why the enclosures are rigorous: products, one sum and a difference, each
of which preserves inclusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from oracle.arithmetic.base import Arithmetic, V


@dataclass(frozen=True, slots=True)
class Turned(Generic[V]):
    """D [R, 1] and dx [R, n]."""

    total: V
    dx: V


def softmax_backward(ar: Arithmetic[V], y: V, dy: V) -> Turned[V]:
    total = ar.round(ar.row_sum(ar.round(ar.mul(y, dy), "product"), "row_sum"), "total")
    return Turned(total, ar.round(ar.mul(y, ar.round(ar.sub(dy, total), "difference")), "output"))


def of_log(ar: Arithmetic[V], p: V, dy: V) -> Turned[V]:
    """The same for log_softmax, with p = exp of its output."""
    total = ar.round(ar.row_sum(dy, "row_sum"), "total")
    return Turned(total, ar.round(ar.sub(dy, ar.mul(p, total)), "output"))
