"""G1 for softmax, log_softmax and logsumexp: derived bounds, in closed form, for any order of summation.

One row, exact numbers: m the maximum, l = sum exp(x - m), L = m + ln l, p = exp(x - L). A kernel's weights
are w_j = exp(x_j - m + a_j) with |a_j| <= rho_j, up to one common factor and an absolute error w where exp
underflows:

    rho_j = kx u (m - x_j) + kS u (|x_j| + |m|) - ln(1 - e_exp) - R ln(1 - e_b)

(every k u meaning (1 + u)^k - 1), with R rescales of a running maximum: ceil(n / 16) - 1 or ceil(log2 n),
whichever is more; a tile of one entry must be declared; none in 16-bit arithmetic without a declared tile.
The sum is off by (1 + h), so with lme = ln sum p_j e^rho_j, and because -ln sum p_j e^-rho_j <= lme (Jensen),

    |ln l^ - ln l| <= D = lme - ln(1 - h) - ln(1 - n w e^lme / l)
    |dp_i| <= a + H (p_i + a) + omega_o,   H = (1 + u_div)(1 + u_o) - 1,
              a = p_i expm1(rho_i + D) + w e^D / l + omega
    |dL|   <= A + kL u (|L| + A),   A = D + e_log (ln l + D) + e_ln + km u |m|
    |dy_i| <= B + kL u (|y_i| + B),   y = ln p,
              B = kx u (m - x_i) + kS u (|x_i| + |m|) + A

and L and y are then rounded to the output. Roundings by form of the exponent, c = log2 e (itself rounded), M
a stored stand-in for m c:

    form     kx kS km kL
    natural   1  0  0  1   exp(fl(x - m))
    exp2      3  0  1  3   fl(fl(x - m) c): shift, constant, product; or fma(x, c, -M): constant and fma.
    With M
                           in the exponents and in L, the error of M is one common shift and cancels; where L
                           or y uses m instead, it costs u |m| (km). L = (M + log2 l) ln 2 has a sum, a
                           product and a constant (kL), and the constant's error in c acts on |m| (km again).
    scaled    5  2  2  3   fl(x c) - M: a rounding on x and one on m that do not cancel; also fma in the
                           exponents with exp2(fl((m_old - m_new) c)) as the rescale: u (|m_t| + |m|), and
                           |m_t| <= |x_j| + (m - x_j).

A result formed from L (``from_lse``): y = fl(x - L^) errs by |dL| + u (|y| + |dL|), and p = exp(y^) by
p expm1(|dL| + kx u (|y| + |dL|) - ln(1 - e_exp)) + w.

Two things that a first-order text for wide formats does not need:

- In a 16-bit format h reaches 1 at n = 256. But a rounded sum of non-negative numbers never falls below any
  of its terms, in any order, so p^_i <= e^(2 rho_i) + w, and the error is at most max(p_i, that - p_i).
- w, the absolute error of exp below the normal range, is the smallest normal number for fp32 and fp64
  (hardware flushes), but half the smallest subnormal for a 16-bit stage, where 2^-14 would swamp everything;
  `flush` restores the first.

Evaluated upward in float64 from the enclosures; a last factor covers the roundings of the evaluation itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log1p, log2

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.constants import Constants, compound, constants, row_sum_error, tiles
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.softmax.case import clean_rows

# exponent -> (kx, kS, km, kL)
ROUNDINGS = {"natural": (1, 0, 0, 1), "exp2": (3, 0, 1, 3), "scaled": (5, 2, 2, 3)}
LARGEST_EXPONENT = 600.0
# Above the radius that an excluded entry has in ball arithmetic, below every non-zero number of the
# narrower formats.
EXCLUDED = 2.0**-900
LOG2_E = 1.4426950408889636


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Upper bounds of what the rows look like; [r, n] or [r, 1]."""

    visible: NDArray[np.bool_]
    size: Float64Array
    below: Float64Array
    log_p: Float64Array
    log_p_size: Float64Array
    p: Float64Array
    max_size: Float64Array
    lse_size: Float64Array
    total_inverse: Float64Array
    log_total: Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The computed weights under one form.

    rho [r, n]; log_total, the error D of ln l^; logged, the same after the logarithm; lift, the largest
    factor by which a shift that is off raises all weights. All three [r, 1].
    """

    rho: Float64Array
    log_total: Float64Array
    logged: Float64Array
    lift: Float64Array


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` per form: [r, n], for logsumexp [r, 1]; see `oracle.bounds.table.Bounds`.

    A log_softmax entry whose x is -inf is -inf itself: nothing is promised by this bound (inf), a
    structural check owns it.
    """
    input_format = format_of(case.arrays["x"])
    observed = formats.get("out", input_format)
    x, _, _, _ = clean_rows(case, block.rows)
    land = _rows(block, x)
    grow = 1.0 + 2.0**-52 * (x.shape[1] + 512)
    results = []
    with np.errstate(all="ignore"):
        for form in forms:
            c = constants(form, input_format)
            weights = _weights(land, form, c, input_format)
            u_o, omega_o = _output_rounding(form, c, observed)
            if case.op == "softmax":
                found = _softmax(land, weights, form, c, u_o, omega_o) * grow
                broken = _exponents_overflow(land, form, c) & np.ones(found.shape, dtype=bool)
            else:
                error, size = (_lse, land.lse_size) if case.op == "logsumexp" else (_log_softmax, land.log_p_size)
                inner = error(land, weights, form, c)
                found = (inner + u_o * (size + inner) + omega_o) * grow
                # The threshold itself leaves room for the output's rounding.
                broken = (size + inner) * grow >= min(observed.overflow_threshold, c.compute.overflow_threshold)
                broken |= _exponents_overflow(land, form, c)
                if case.op == "log_softmax":
                    found = np.where(land.visible, found, np.inf)
                    # x - m or its multiple by log2 e is formed first, and may overflow where the result
                    # does not.
                    broken |= land.below * LOG2_E >= c.compute.overflow_threshold
            broken |= _sum_overflows(land, weights, form, c)
            results.append({"out": Bounded(np.asarray(found), np.asarray(broken))})
    return results


def _rows(block: Block, x: Float64Array) -> _Rows:
    visible = block.visible_keys()
    shift, total, lse, log_p = (block.part(n) for n in ("shift", "total", "lse", "log_p"))
    with np.errstate(all="ignore"):
        # The range of an fp64 row may exceed float64; beyond 1e300 its size does not matter.
        below = np.where(visible, np.minimum((shift.hi - x) * (1 + 2.0**-50), 1e300), 0.0)
        upper = log_p.hi + log_p.lo + log_p.rad + 2.0**-50 * np.abs(log_p.hi)
        # l >= 1 gives a second upper bound of ln p, which stays finite where the first does not.
        upper = np.where(visible, np.fmin(upper, -below * (1 - 2.0**-49)), -np.inf)
        lowest = np.maximum((total.hi - total.rad) * (1 - 2.0**-50), 1.0 - 2.0**-40)
        return _Rows(
            visible=visible,
            size=np.abs(x),
            below=below,
            log_p=upper,
            log_p_size=np.where(visible, log_p.upper_abs(), 0.0),
            p=np.minimum(np.exp(upper) * (1 + 2.0**-49), 1.0),
            max_size=np.abs(shift.hi),
            lse_size=lse.upper_abs(),
            total_inverse=1.0 / lowest,
            log_total=np.maximum(np.log(total.upper_abs()), 0.0) * (1 + 2.0**-50),
        )


def _rounded_times(count: int, u: float) -> float:
    """(1 + u)^count - 1."""
    return float(np.expm1(count * log1p(u)))


def _weights(land: _Rows, form: Contract, c: Constants, input_format: Format) -> _Weights:
    kx, kS, _, _ = ROUNDINGS[form.scores.exponent]
    n = land.size.shape[1]
    exponent = _rounded_times(kx, c.u) * land.below + _rounded_times(kS, c.u) * (land.size + land.max_size)
    if form.arithmetic.flush:
        exponent = exponent + 2 * max(input_format.smallest_normal, c.compute.smallest_normal)
    exponent = exponent - log1p(-c.e_exp)
    rescales = _rescales(form, c, n)
    rho = np.where(land.visible, exponent - rescales * log1p(-c.e_b), 0.0)
    tilted = land.log_p + rho
    top = tilted.max(axis=1, keepdims=True)
    # Clipping an exponent would be unsound: far rows take ln sum p e^rho through the largest one.
    near = np.log1p((np.exp(np.minimum(tilted, LARGEST_EXPONENT)) * -np.expm1(-rho)).sum(axis=1, keepdims=True))
    far = top + np.log(np.exp(tilted - top).sum(axis=1, keepdims=True))
    lme = np.where(top <= LARGEST_EXPONENT, near, np.maximum(far, 0.0))
    # fma(x, c, -M) moves every weight by the rounding of M; below exp's normal range that costs absolute
    # error.
    lift = np.exp(0.0 if form.scores.exponent == "natural" else 2 * c.u * land.max_size)
    lost = n * _underflow(form, c) * lift * np.exp(lme) * land.total_inverse
    h = _sum_error(form, c, n)
    if h < 1:
        log_total = np.where(lost < 1, lme - log1p(-h) - np.log1p(-np.minimum(lost, 0.999999)), np.inf)
        log_total = np.where(lost < 0.999999, log_total, np.inf)
    else:
        log_total = np.full(lme.shape, np.inf)
    logged = log_total + c.e_log * (land.log_total + log_total) + c.e_ln
    return _Weights(rho, log_total, logged, lift)


def _rescales(form: Contract, c: Constants, n: int) -> int:
    # A 16-bit contract is that of separate calls (max, subtract, exp, sum, divide), which never rescale,
    # unless it names its tile.
    if form.sums.tile is None and c.compute.name not in ("fp32", "fp64"):
        return 0
    # A tree of partial maxima rescales at each of its levels, a loop over tiles once a tile.
    return max(tiles(form, n) - 1, ceil(log2(n)))


def _underflow(form: Contract, c: Constants) -> float:
    wide = c.compute.name in ("fp32", "fp64")
    return c.w if wide or form.arithmetic.flush else c.compute.omega


def _sum_error(form: Contract, c: Constants, n: int) -> float:
    """h; a row sum declared finer than the compute format is rounded to that once, at its end."""
    if form.sums.row_sum in ("unrounded", "rounded"):
        return row_sum_error(form, c, n)
    inner = FORMATS[form.sums.row_sum].unit_roundoff if form.sums.row_sum in FORMATS else c.u
    if inner >= c.u:
        return row_sum_error(form, c, n)
    depth = (form.sums.tile or n) + 2 * tiles(form, n) + 2
    return compound(c.g(depth, u=inner), c.u)


def _output_rounding(form: Contract, c: Constants, observed: Format) -> tuple[float, float]:
    # The observed format rounds in any case; a coarser one counts where the contract declares it.
    declared = (c.u_o, c.omega_o) if form.output.stored_as is not None else (0.0, 0.0)
    omega = observed.smallest_normal if form.arithmetic.flush else observed.omega
    return max(declared[0], observed.unit_roundoff), max(declared[1], omega)


def _softmax(land: _Rows, weights: _Weights, form: Contract, c: Constants, u_o: float, omega_o: float) -> Float64Array:
    w = _underflow(form, c)
    if form.output.from_lse:
        dl = _lse(land, weights, form, c)
        far = dl + _rounded_times(ROUNDINGS[form.scores.exponent][0], c.u) * (land.log_p_size + dl) - log1p(-c.e_exp)
        a = np.where(land.p > 0, land.p * np.expm1(far), 0.0) + w
        found = a + u_o * (land.p + a) + omega_o
    else:
        a = np.where(land.p > 0, land.p * np.expm1(weights.rho + weights.log_total), 0.0)
        a = a + w * weights.lift * np.exp(weights.log_total) * land.total_inverse
        outer = compound(c.u_div, u_o)
        # The quotient is formed in the compute format, and may underflow there.
        a = a + (c.w if form.arithmetic.flush else c.compute.omega)
        found = a + outer * (land.p + a) + omega_o
        largest = (np.exp(2 * weights.rho) + w * weights.lift) * (1 + outer) + omega_o
        found = np.fmin(found, np.maximum(land.p, largest))
    return np.where(land.visible, found, EXCLUDED)


def _lse(land: _Rows, weights: _Weights, form: Contract, c: Constants) -> Float64Array:
    _, _, km, kL = ROUNDINGS[form.scores.exponent]
    a = weights.logged + _rounded_times(km, c.u) * land.max_size
    return np.asarray(a + _rounded_times(kL, c.u) * (land.lse_size + a))


def _log_softmax(land: _Rows, weights: _Weights, form: Contract, c: Constants) -> Float64Array:
    kx, kS, km, kL = ROUNDINGS[form.scores.exponent]
    if form.output.from_lse:
        b = _lse(land, weights, form, c)
        return np.asarray(b + c.u * (land.log_p_size + b))
    b = _rounded_times(kx, c.u) * land.below + _rounded_times(kS, c.u) * (land.size + land.max_size)
    b = b + _rounded_times(km, c.u) * land.max_size + weights.logged
    return np.asarray(b + _rounded_times(kL, c.u) * (land.log_p_size + b))


def _exponents_overflow(land: _Rows, form: Contract, c: Constants) -> NDArray[np.bool_]:
    """[r, 1]: rows in which x log2 e, formed before the shift, leaves the compute format."""
    if form.scores.exponent == "natural":
        return np.zeros(land.max_size.shape, dtype=bool)
    largest = np.where(land.visible, land.size, 0.0).max(axis=1, keepdims=True)
    return np.asarray(largest * LOG2_E >= c.compute.overflow_threshold)


def _sum_overflows(land: _Rows, weights: _Weights, form: Contract, c: Constants) -> NDArray[np.bool_]:
    """[r, 1]: rows whose weights or sum may leave the format that they are formed in.

    65504 equal entries do in fp16; so does any row whose shift M is off by more than the largest exponent
    (|m| > 1e9 in fp32), and p = exp(x - L) where L is as far off.
    """
    n = land.size.shape[1]
    drift = np.where(np.isfinite(weights.log_total), weights.log_total, 2 * n * c.u)
    reach = land.log_total + drift + np.log(weights.lift)
    if form.output.from_lse:
        reach = np.maximum(reach, _lse(land, weights, form, c))
    limit = c.compute.overflow_threshold
    return np.asarray(reach >= (np.log(limit) if limit < inf else LARGEST_EXPONENT))
