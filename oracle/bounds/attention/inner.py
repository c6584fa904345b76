"""Inside one query head's backward pass: what each form may be off by in P, dP, D and dS.

With |P^ - P| <= eP and |dP^ - dP| <= eD, every product's cross terms kept:

    s = eP (|dP - D| + y) + P y,   y = eD + dD,   |dS^ - dS| <= s with its roundings

`oracle.bounds.attention.gradient` sums it to gradients. What forms share is made once (`Sizes.once`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oracle.bounds import forward
from oracle.bounds.attention import output as attention
from oracle.bounds.landscape import Landscape
from oracle.contract.constants import Constants, compound, dot_error
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array, Format

# Roundings of L when it meets the scores again (log2 e, product, difference).
LSE_ROUNDINGS = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class FormErrors:
    """What one form allows in one query head; all [r, n] (without a sink's column) or [r, 1], upper bounds.

    cast: error of the P that meets dO. ds, dx: of dS where it is asked for, and of dX as it meets k and q. sink: of the
    sink's column of dS. broken [r, 1]: rows in which an intermediate may overflow. Of a stack of heads all have a
    leading axis.
    """

    constants: Constants
    cast: Float64Array
    ds: Float64Array | None
    dx: Float64Array
    sink: Float64Array | None
    broken: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Upper bounds of magnitudes in one head: dO, O [r, Dv], v [n, Dv], |dO||v|, the inner parts [r, n] or [r, 1]; of
    a stack of heads with a leading axis.

    dp_wrong: what dP is off by because dO or v was itself computed (then they and |dO||v| are those of the computed
    ones). delta_wrong [r, 1]: what D = dO . O is off by, where O is not simply what `allowed` says.
    """

    do: Float64Array
    v: Float64Array
    out: Float64Array
    magnitude: Float64Array
    slope: Enclosure | None
    visible: NDArray[np.bool_]
    sink: Float64Array | None
    fmt: Format
    softcap: float | None
    alpha: float
    p: Float64Array
    dp: Float64Array
    delta: Float64Array
    centred: Float64Array
    ds: Float64Array
    dx: Float64Array
    dp_wrong: Float64Array | float = 0.0
    delta_wrong: Float64Array | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What forms of an equal ``what`` share."""
        if what not in self._known:
            self._known[what] = make()
        found: T = self._known[what]
        return found


def form_errors(x: Sizes, allowed: attention.Errors, form: Contract, *, with_ds: bool = False) -> FormErrors:
    c, land = allowed.constants, allowed.land
    n, dims = x.p.shape[-1], x.do.shape[-1]
    grow = 1 + 2.0**-50 * (land.keys + dims + 512)
    # Forms that do the same forwards have the same `allowed`.
    e_p, e_sink = x.once(("p", id(allowed)), lambda: _weight_errors(x, allowed))
    cast = x.once(("cast", id(allowed)), lambda: e_p * (1 + c.u_P) + (c.u_P * x.p + c.omega_P))
    if form.scores.stores:
        # P itself is what is stored.
        e_p = cast
        e_sink = None if e_sink is None or x.sink is None else e_sink + c.u_P * (x.sink + e_sink) + c.omega_P
    narrow = x.fmt if x.fmt.precision < c.compute.precision else c.compute
    chain = compound(dot_error(form, c, dims), c.u_v, c.u_v)
    # All that the error of dP follows from.
    of_dp = (chain, c.w, c.omega_v, narrow.name if form.gradient.dp_stored else None)
    e_dp = x.once(("dp", *of_dp), lambda: _dp_error(x, chain, c, narrow if form.gradient.dp_stored else None))
    e_delta = _delta_error(x, allowed, form, e_p, e_dp, of_dp)
    stores = form.gradient.stores + (3 if form.scores.stores and x.softcap is not None else 0)
    unit, lost = (narrow.unit_roundoff, narrow.omega) if stores else (0.0, 0.0)
    unit = max(unit, c.u_v)
    rounding = float(np.expm1(max(stores, 1) * np.log1p(unit)))
    # Where the scale joins before dS is stored, or flushed, what is lost next to zero is lost of scaled numbers.
    near = stores * lost + (c.w if form.arithmetic.flush else 0.0)
    near *= max(1.0, 1.0 / x.alpha if x.alpha else 1.0)
    # With y = Y + y' of which Y is common to many forms and y' [r, 1] is not: s = eP (|dP - D| + Y + y') + P y' + P Y.
    common = x.once(("y", c.u, *of_dp), lambda: (1 + c.u) * e_dp + c.u * x.centred)
    own = (1 + c.u) * e_delta
    s = x.once(("centred", c.u, *of_dp), lambda: x.centred + common) + own
    s *= e_p
    s += x.p * own

    factor = grow * (1 + c.u) * (1 + rounding)

    def same(size: Float64Array, wrong: float) -> Float64Array:
        """What forms share of s with its own roundings, and with those of what was stored of it, of ``size``."""

        def make() -> Float64Array:
            own = (1 + rounding) * (c.u * x.ds + c.w) + rounding * size + wrong
            return np.asarray(factor * x.p * common + grow * own)

        return x.once(("s", wrong, id(size), rounding, c.u, c.w, *of_dp), make)

    ds = s * factor + same(x.ds, stores * lost) if with_ds else None
    if x.slope is not None and x.softcap is not None:
        s += x.p * common
        s += c.u * (x.ds + s) + c.w
        high = np.minimum(x.slope.hi + x.slope.rad, 1.0)
        t = np.sqrt(np.clip(1.0 - (x.slope.hi - x.slope.rad), 0.0, 1.0))
        e_t = allowed.eps[..., :n] / x.softcap + 2 * c.u
        s_x = s * high + (x.ds + s) * (2 * t * e_t + e_t**2 + 3 * c.u)
        s_x = (s_x + rounding * (x.dx + s_x) + near) * grow
    else:
        s_x = s
        s_x *= factor
        s_x += same(x.dx, near)
    sink = None
    if e_sink is not None and x.sink is not None:
        y = e_delta + c.u * (x.delta + e_delta)
        sink = e_sink * (x.delta + y) + x.sink * y
        sink = (sink + (rounding + 2 * c.u) * (x.sink * x.delta + sink) + stores * lost + c.w) * grow
    limit = min(c.compute.max_finite, narrow.max_finite if form.gradient.dp_stored or stores else np.inf) / 2
    largest = x.once("largest", lambda: x.magnitude.max(axis=-1, keepdims=True, initial=0.0))
    broken = allowed.broken | ~(largest < limit)
    of_v = x.once(("hidden", id(allowed)), lambda: (cast if land.everything else np.where(x.visible, cast, 0.0)) * grow)
    if not land.everything:
        s_x = np.where(x.visible, s_x, 0.0)
        ds = None if ds is None else np.where(x.visible, ds, 0.0)
    return FormErrors(c, of_v, ds, s_x, sink, broken)


def _delta_error(
    x: Sizes, allowed: attention.Errors, form: Contract, e_p: Float64Array, e_dp: Float64Array, of_dp: Hashable
) -> Float64Array:
    """What D is off by [r, 1]; ``of_dp``: what names e_dp."""
    c, n, dims = allowed.constants, x.p.shape[-1], x.do.shape[-1]
    if form.gradient.delta == "output":
        if x.delta_wrong is not None:
            return x.delta_wrong
        b_o = np.where(np.isfinite(allowed.out.bound), allowed.out.bound, np.inf)
        gap = b_o + c.g(dims) * (x.out + b_o)
        return np.asarray(np.where(x.do > 0, x.do * gap, 0.0).sum(axis=-1, keepdims=True) + dims * c.w)
    # sum eP (|dP| + eD) + P eD, and the sum's own roundings of (P + eP)(|dP| + eD).
    g = c.g(n + 1)
    reach = x.once(("reach", of_dp), lambda: x.dp + e_dp)
    same = x.once(("delta", g, of_dp), lambda: _row_sum(x.p, e_dp + g * reach))
    seen = e_p if allowed.land.everything else np.where(x.visible, e_p, 0.0)
    return np.asarray((1 + g) * _row_sum(seen, reach) + same + n * c.w)


def _row_sum(a: Float64Array, b: Float64Array) -> Float64Array:
    return np.asarray(np.einsum("...ij,...ij->...i", a, b)[..., None])


def _dp_error(x: Sizes, chain: float, c: Constants, stored: Format | None) -> Float64Array:
    """eD [r, n]: of dP = dO v^T, which may be stored."""
    wrong = chain * x.magnitude + (2 * x.do.shape[-1] + 2) * c.w
    if c.omega_v:
        wrong += 2 * c.omega_v * (x.do.sum(axis=-1, keepdims=True) + x.v.sum(axis=-1)[..., None, :])
    wrong = wrong + x.dp_wrong
    if stored is not None:
        wrong = wrong + stored.unit_roundoff * (x.dp + wrong) + stored.omega
    return np.asarray(wrong)


def _weight_errors(x: Sizes, allowed: attention.Errors) -> tuple[Float64Array, Float64Array | None]:
    """(eP [r, n], that of the sink [r, 1]): |P^ - P| where P comes from the saved L, or from its own normalisation.

    An error pi of the exponent gives P e^pi - P. Of pi, one part is common to forms whose scores err alike, and the
    rest, x, is that of a row: P e^(pi + x) - P = e^x (P e^pi - P) + (e^x - 1) P.
    """
    c, land = allowed.constants, allowed.land
    n = x.p.shape[-1]
    d_l, roundings = allowed.lse.bound, c.u * forward.EXPONENT_ROUNDINGS
    row = d_l + roundings * (land.log_total + d_l) + c.u * LSE_ROUNDINGS * (land.lse_size + d_l) - np.log1p(-c.e_exp)
    pi, moved = x.once(("weights", id(allowed.eps), c.u), lambda: _common_weight_errors(allowed.eps, land, roundings))
    if moved is not None and x.sink is None and float(row.max(initial=0.0)) <= 1.0:
        wrong = moved * np.exp(row)
        wrong += land.p * np.expm1(row)
        wrong += c.w
        return land.seen(wrong), None
    pi = pi + row
    if x.sink is not None and allowed.sink_rho is not None:
        pi[..., -1:] += allowed.sink_rho
    exponent = land.log_p + pi
    upper = np.where(
        exponent <= forward.LARGEST_EXPONENT, np.exp(np.minimum(exponent, forward.LARGEST_EXPONENT)), np.inf
    )
    wrong = np.where(land.visible, upper * -np.expm1(-pi) + c.w, 0.0)
    return wrong[..., :n], wrong[..., n:] if x.sink is not None else None


def _common_weight_errors(
    eps: Float64Array, land: Landscape, roundings: float
) -> tuple[Float64Array, Float64Array | None]:
    """(pi, P e^pi - P) [r, n] of the exponents' errors that are not those of a whole row; None where they are large."""
    pi = eps * (1 + roundings)
    pi += roundings * land.below_max
    largest = float(land.seen(pi).max(initial=0.0))
    return pi, np.expm1(pi) * land.p if largest <= 1.0 else None
