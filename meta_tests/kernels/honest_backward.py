"""Kernels of attention's gradients in real float32 arithmetic that keep their contract: what no bound may reject.

`run` evaluates one query head: a forward pass that saves O and L, or P, and the backward pass from what was saved.
Everything a contract leaves open is a field. Shares no code with the oracle but the rounding to a format.

Shapes: q [Sq, D], k [Sk, D], v [Sk, Dv], do [Sq, Dv], visible bool [Sq, Sk], bias [Sq, Sk] or None; float64 arrays that
hold stored numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, Format

Array = NDArray[Any]
LOG2_E = np.float32(1.4426950408889634)
# Beyond this share of its limit numpy's own exp could exceed it.
PUSH = np.float32(1 + 2.4 * 2.0**-24)


@dataclass(frozen=True)
class Backward:
    """An honest kernel of gradients. ``contract``: what it declares; ``formats``: the input formats it is run in.

    form: index of the form of its contract that it evaluates. saved: ``lse`` (P is recomputed) or ``weights``. exp2:
    whether P is recomputed as exp2(S log2 e - L log2 e). delta, stores, dp_stored: as in the contract. cast: P and dS
    meet the products in the input format. order: of every sum. scale_last: the scale multiplies dQ, dK instead of dS.
    eager: every intermediate is stored in the input format. high: exp errs upwards at its limit. tile: of keys and
    queries. rounded_sum, lag: of the forward pass. tf32: operands of products are cut to it. flush: subnormal numbers
    are zero in every product, sum and result.
    """

    contract: dict[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ("fp32", "fp16", "bf16")
    form: int = 0
    saved: str = "lse"
    exp2: bool = False
    delta: str = "output"
    stores: int = 0
    dp_stored: bool = False
    cast: bool = False
    order: str = "forward"
    scale_last: bool = True
    eager: bool = False
    high: bool = False
    tile: int = 16
    rounded_sum: bool = False
    sqrt_scale: bool = False
    parts_stored: bool = True
    tf32: bool = False
    flush: bool = False

    def operand(self, x: Array) -> Array:
        """x as it meets a product."""
        if self.tf32:
            x = FORMATS["tf32"].round(x.astype(np.float64)).astype(x.dtype)
        return self.flushed(x)

    def flushed(self, x: Array) -> Array:
        return np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x) if self.flush else x


KERNELS: dict[str, Backward] = {
    "flash": Backward({"preset": "flash"}, cast=True, stores=1),
    "flash exp2": Backward({"preset": "flash"}, cast=True, stores=1, exp2=True, high=True),
    "flash backwards": Backward({"preset": "flash"}, cast=True, stores=1, order="backward", tile=32),
    "flash pairwise": Backward({"preset": "flash"}, cast=True, stores=1, order="pairwise", scale_last=False),
    "flash, rounded sum": Backward({"preset": "flash"}, form=3, cast=True, stores=1, rounded_sum=True),
    "flash, D from weights": Backward(
        {"preset": "flash"}, form=5, cast=True, stores=1, delta="weights", saved="weights"
    ),
    "autograd": Backward(
        {"preset": "flash"}, form=6, cast=True, stores=2, dp_stored=True, delta="weights", saved="weights"
    ),
    "fp32": Backward({"preset": "fp32"}),
    "fp32 exp2": Backward({"preset": "fp32"}, exp2=True, high=True, order="backward"),
    "fp32, D from weights": Backward({"preset": "fp32"}, form=3, delta="weights", saved="weights"),
    "sqrt scale": Backward({"preset": "sdpa_math"}, delta="weights", saved="weights", sqrt_scale=True),
    "eager": Backward({"preset": "eager"}, delta="weights", saved="weights", eager=True, stores=2, dp_stored=True),
    "fp64": Backward({"preset": "fp64"}, ("fp64",)),
    "tf32": Backward({"preset": "tf32"}, ("fp32",), tf32=True),
    "flushed": Backward({"preset": "fp32", "flush": True}, ("fp32",), flush=True),
    "flushed, scale first": Backward({"preset": "fp32", "flush": True}, ("fp32",), flush=True, scale_last=False),
}  # fmt: skip


@dataclass(frozen=True)
class Gradients:
    dq: Array
    dk: Array
    dv: Array
    dbias: Array
    dsink: Array
    out: Array


def run(
    kernel: Backward,
    fmt: Format,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    alpha: float,
    visible: Array,
    bias: Array | None = None,
    softcap: float | None = None,
    sink: float | None = None,
    out_stored: bool = True,
    delta_of: Callable[[Array], Array] | None = None,
) -> Gradients:
    """One query head's gradients before their last rounding, dk and dv as this head's share; O as it is saved.

    out_stored: whether O is saved in the input format. delta_of: D [Sq, 1] from that O, if it is not dO . O.
    """
    with np.errstate(all="ignore"):
        made = _Run(kernel, fmt, out_stored, delta_of)
        return made.gradients(q, k, v, do, alpha, visible, bias, softcap, sink)


class _Run:
    def __init__(
        self, kernel: Backward, fmt: Format, out_stored: bool, delta_of: Callable[[Array], Array] | None
    ) -> None:
        self.kernel, self.fmt, self.out_stored, self.delta_of = kernel, fmt, out_stored, delta_of
        self.real: Any = np.float64 if fmt.name == "fp64" else np.float32

    def low(self, x: Array) -> Array:
        """Rounded to the input format and widened again."""
        return x.astype(self.fmt.dtype).astype(self.real)

    def kept(self, x: Array) -> Array:
        """An intermediate of an eager kernel is stored."""
        return self.low(x) if self.kernel.eager else x

    def sum(self, terms: Array, axis: int) -> Array:
        parts = list(np.moveaxis(terms, axis, 0))
        if self.kernel.order == "backward":
            parts.reverse()
        if self.kernel.order == "pairwise":
            while len(parts) > 1:
                pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
                parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
            return parts[0]
        total = parts[0]
        for part in parts[1:]:
            total = self.kernel.flushed(total + part)
        return total

    def dot(self, a: Array, b: Array) -> Array:
        a, b = self.kernel.operand(a), self.kernel.operand(b)
        return self.sum(self.kernel.flushed(a[:, :, None] * b[None]), 1)

    def power(self, x: Array) -> Array:
        y = np.exp2(x) if self.kernel.exp2 else np.exp(x)
        return np.where(x == 0, y, y * PUSH) if self.kernel.high and self.real is np.float32 else y

    def scores(
        self, q: Array, k: Array, alpha: float, bias: Array | None, softcap: float | None
    ) -> tuple[Array, Array | None]:
        """(S, tanh or None)."""
        if self.kernel.sqrt_scale:
            root = self.real(np.sqrt(self.real(alpha)))
            s = self.dot(q * root, (k * root).T)
        else:
            s = self.kept(self.kept(self.dot(q, k.T)) * self.real(alpha))
        t = None
        if softcap is not None:
            t = self.kept(np.tanh(self.kept(s / self.real(softcap))))
            s = self.kept(t * self.real(softcap))
        if bias is not None:
            s = self.kept(s + bias.astype(self.real))
        return s, t

    def gradients(
        self,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
        alpha: float,
        visible: Array,
        bias: Array | None,
        softcap: float | None,
        sink: float | None,
    ) -> Gradients:
        kernel, real = self.kernel, self.real
        q, k, v, do = (np.asarray(a, dtype=real) for a in (q, k, v, do))
        s, t = self.scores(q, k, alpha, bias, softcap)
        s = np.where(visible, s, -np.inf)
        top = s.max(axis=1, keepdims=True)
        logit = None if sink is None else real(sink)
        if logit is not None:
            top = np.maximum(top, logit)
        e = np.where(visible, np.exp(s - top), real(0))
        cast = self.low(e) if kernel.cast else e
        total = self.sum(cast if kernel.rounded_sum else e, 1)[:, None]
        if logit is not None:
            total = total + np.exp(logit - top)
        p = e / total
        if kernel.saved == "lse":
            out = self.dot(cast, v) / total
            lse = top + np.log(total)
            p = self._recomputed(s, lse, visible)
        else:
            p = self.kept(p)
            out = self.dot(self.low(p) if kernel.cast else p, v)
        out = self.low(out) if self.fmt.precision < 24 and self.out_stored else out
        meets = self.low(p) if kernel.cast else p
        dv = self.dot(meets.T, do)
        dp = self.dot(do, v.T)
        dp = self.low(dp) if kernel.dp_stored else dp
        weight = None
        if logit is not None:
            weight = self.kept(np.exp(logit - top) / total)
        delta = self.sum(p * dp, 1)[:, None]
        if kernel.delta == "output":
            delta = self.sum(do * out, 1)[:, None] if self.delta_of is None else self.delta_of(out)
        ds = kernel.flushed(p * kernel.flushed(dp - delta))
        dbias = ds
        for _ in range(kernel.stores if kernel.eager else 0):
            dbias = self.low(dbias)
        dx = self.low(ds) if kernel.eager or kernel.stores > 1 else ds
        if t is not None:
            dx = self.kept(dx * (1 - t * t))
        factor = real(alpha)
        if kernel.sqrt_scale:
            root = real(np.sqrt(factor))
            dq, dk = self.dot(dx, k * root) * root, self.dot(dx.T, q * root) * root
        elif kernel.scale_last and not kernel.eager:
            dx = self.low(dx) if kernel.stores else dx
            dq, dk = (kernel.flushed(self.dot(*pair) * factor) for pair in ((dx, k), (dx.T, q)))
        else:
            dx = kernel.flushed(dx * factor)
            dx = self.low(dx) if kernel.stores else dx
            dq, dk = self.dot(dx, k), self.dot(dx.T, q)
        none = np.zeros((1, 1), real)
        dsink = none if weight is None else -self.sum(self.kept(weight * delta), 0)[None]
        return Gradients(dq, dk, dv, dbias, dsink, out)

    def _recomputed(self, s: Array, lse: Array, visible: Array) -> Array:
        if self.kernel.exp2:
            base = lse * LOG2_E
            return np.where(visible, self.power(s * LOG2_E - base), self.real(0))
        return np.where(visible, self.power(s - lse), self.real(0))
