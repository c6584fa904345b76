"""Honest kernels that compute in float64 and round once, each with steps that a test replaces to break it.

In NumPy, for softmax, log_softmax, logsumexp, rope and its gradient, rope_apply and mla. Every factory returns a
target function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import format_of
from targets.builtin import rope_frequencies
from targets.builtin.rope_frequencies import by_pair, length_of

Array = NDArray[Any]
Step = Callable[..., Any]


def same(*values: Any) -> Any:
    """The step that changes nothing."""
    return values[0] if len(values) == 1 else values


def described(function: Callable[..., Any], op: str, **conventions: str) -> Callable[..., Any]:
    function.__attn_oracle__ = {  # type: ignore[attr-defined]
        "op": op,
        "name": f"small_{op}",
        "framework": "numpy",
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "devices": ("cpu",),
        "conventions": conventions,
    }
    return function


def rounded(values: Array, like: Array) -> Array:
    return np.asarray(format_of(like).store(values))


def rows_kernel(
    op: str,
    *,
    enter: Step = same,
    shift: Step | None = None,
    weights: Step = same,
    total: Step = lambda e: e.sum(axis=-1, keepdims=True),
    leave: Step = rounded,
) -> Callable[..., Any]:
    """softmax, log_softmax or logsumexp over the last axis; an empty row gives NaN (logsumexp: -inf)."""

    def kernel(x: Array) -> Array:
        with np.errstate(all="ignore"):
            wide = enter(x.astype(np.float64))
            top = wide.max(axis=-1, keepdims=True) if shift is None else shift(wide)
            top = np.where(np.isneginf(top), 0.0, top)
            e = weights(np.exp(wide - top))
            norm = total(e)
            if op == "softmax":
                return np.asarray(leave(e / norm, x))
            if op == "log_softmax":
                return np.asarray(leave(wide - top - np.log(norm), x))
            return np.asarray(leave((top + np.log(norm))[..., 0], x))

    return described(kernel, op, **({"empty_row_lse": "-inf"} if op == "logsumexp" else {}))


def rope_kernel(
    *,
    back: bool = False,
    enter: Step = same,
    positions: Step = same,
    base: Step = same,
    layout: Step = same,
    width: Step = same,
    scaling: Step = same,
    length: Step = same,
    table: Step = same,
    leave: Step = rounded,
) -> Callable[..., Any]:
    """rope, or its gradient (``back``), in both layouts.

    ``table`` gets and returns (cos, sin); the other steps get what they are called after.
    """
    place, radix, order, extent, parameters, count = positions, base, layout, width, scaling, length

    def turn(x: Array, positions: Array, base: float, layout: str, rotary_dim: int | None, scaling: Any) -> Array:
        dim = extent(x.shape[-1] if rotary_dim is None else rotary_dim)
        known = parameters(scaling)
        theta = rope_frequencies.frequencies(radix(base), dim, known, count(length_of(positions, known)))
        angle = place(by_pair(positions, known)) * theta
        size = rope_frequencies.magnitude(known)
        cos, sin = table(size * np.cos(angle), size * np.sin(angle))
        if angle.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        return turned(enter(x.astype(np.float64)), x, cos, -sin if back else sin, order(layout), leave)

    def rope(
        x: Array,
        positions: Array,
        *,
        base: float = 10000.0,
        layout: str = "half",
        rotary_dim: int | None = None,
        scaling: Any = None,
    ) -> Array:
        return turn(x, positions, base, layout, rotary_dim, scaling)

    def rope_backward(
        dy: Array,
        positions: Array,
        *,
        base: float = 10000.0,
        layout: str = "half",
        rotary_dim: int | None = None,
        scaling: Any = None,
    ) -> Array:
        return turn(dy, positions, base, layout, rotary_dim, scaling)

    return described(rope_backward, "rope_backward") if back else described(rope, "rope")


def turned(wide: Array, x: Array, cos: Array, sin: Array, layout: str, leave: Step) -> Array:
    dim = 2 * cos.shape[-1]
    half = layout == "half"
    first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if half else (slice(0, dim, 2), slice(1, dim, 2))
    out = wide.copy()
    out[..., first] = wide[..., first] * cos - wide[..., second] * sin
    out[..., second] = wide[..., first] * sin + wide[..., second] * cos
    return np.asarray(leave(out, x))


def apply_kernel(*, enter: Step = same, table: Step = same, leave: Step = rounded) -> Callable[..., Any]:
    """rope_apply in both layouts."""

    def kernel(x: Array, cos: Array, sin: Array, *, layout: str = "half") -> Array:
        return turned(
            enter(x.astype(np.float64)), x, *table(cos.astype(np.float64), sin.astype(np.float64)), layout, leave
        )

    return described(kernel, "rope_apply")


def mla_kernel(
    *,
    enter: Step = same,
    scale: Step = same,
    reach: int = 0,
    shift: Step = lambda s: s.max(axis=-1, keepdims=True),
    weights: Step = same,
    total: Step = lambda e: e.sum(axis=-1, keepdims=True),
    logarithm: Step = same,
    leave: Step = rounded,
) -> Callable[..., Any]:
    """mla, materialised; causal masks aligned bottom-right. ``reach``: keys a causal mask lets pass beyond its own."""
    factor = scale

    def kernel(
        q_nope: Array,
        q_pe: Array,
        c_kv: Array,
        k_pe: Array,
        w_uk: Array,
        w_uv: Array,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        return_lse: bool = False,
    ) -> Any:
        like = q_nope
        q, qr, c, kr, uk, uv = (a.astype(np.float64) for a in enter(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv))
        k, v = np.einsum("bkc,hdc->bhkd", c, uk), np.einsum("bkc,hvc->bhkv", c, uv)
        alpha = factor((q.shape[-1] + qr.shape[-1]) ** -0.5 if scale is None else scale)
        s = alpha * (q @ k.swapaxes(-1, -2) + np.einsum("bhqr,bkr->bhqk", qr, kr))
        rows, keys = s.shape[-2:]
        seen = (
            np.arange(keys) <= np.arange(rows)[:, None] + keys - rows + reach
            if is_causal
            else np.ones((rows, keys), dtype=bool)
        )
        s = np.where(seen, s, -np.inf)
        with np.errstate(all="ignore"):
            top = shift(s)
            top = np.where(np.isneginf(top), 0.0, top)
            e = weights(np.exp(s - top))
            norm = total(e)
            # A weight of 0 must not meet an infinite value.
            out = np.where(norm == 0, 0.0, (e / np.where(norm == 0, 1.0, norm)) @ v)
            lse = logarithm((top + np.log(norm))[..., 0])
        return (leave(out, like), lse.astype(np.float32)) if return_lse else leave(out, like)

    return described(kernel, "mla", causal_alignment="bottom_right", lse_base="e", empty_row="zero")
