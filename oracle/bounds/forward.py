"""The parts of the forward bound that attention and mla share: from an error of the scores to one of weights, O and L.

Notation (one row): S scores, m their maximum, l = sum exp(S - m), L = m + ln l, p = exp(S - L). A kernel's weights are
w_j (1 + a_j) with e^-rho_j <= 1 + a_j <= e^rho_j, the same numbers in numerator and denominator; then exactly

    O_a - O = sum_j p_j a_j (v_j - O) / (1 + sum p a),   |.| <= e^(sum p rho) sum_j T_j F_j |v_j - O|,
    T_j = e^(S_j - L + rho_j),  F_j = 1 - e^-rho_j      (Jensen; O_a also stays in the hull of v)

which is closed form, not first order. Everything here is an upper bound computed from enclosures, in float64, from
non-negative numbers; the caller multiplies by `inflation` once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, expm1, log, log1p

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.landscape import Landscape, chosen
from oracle.bounds.spread import Spread
from oracle.contract.constants import Constants, accumulation_error, compound, rescale_error, row_sum_error, tiles
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array, Format

LARGEST_EXPONENT = 600.0
# Up to here three terms of a series are as good as an exponential.
SMALL = 2.0**-8
# Roundings of one score (scale constant, log2 e, product, multiply; bias and slope) and of its exponent, and of |m|,
# |L| in L.
SCORE_ROUNDINGS, SCORE_ROUNDINGS_WITH_BIAS, EXPONENT_ROUNDINGS = 6, 8, 6
MAX_ROUNDINGS, LSE_ROUNDINGS = 4, 3


def dot_scores_error(
    magnitude: Float64Array,
    alpha: float,
    dims: int,
    dot: float,
    c: Constants,
    *,
    with_bias: bool,
    operands: Float64Array | float = 0.0,
) -> Float64Array:
    """eps of S = scale q.k from A = alpha sum |q||k| (``magnitude`` [r, n]): chain, stored operands, roundings,
    underflow.

    ``operands`` [r, n], [r, 1] or a number: sum |q| + sum |k|, which absolute errors of q and k next to zero meet.
    """
    roundings = SCORE_ROUNDINGS_WITH_BIAS if with_bias else SCORE_ROUNDINGS
    chain = (dot + c.u_q + c.u_k + c.u_q * c.u_k) * (1 + dot) + roundings * c.u * (1 + dot) * (1 + c.u_q) * (1 + c.u_k)
    # Products and, where a kernel flushes, sums lose w each; scale, log2 e and the shift once more.
    lost = (1 + alpha) * (2 * dims + 4) * c.w
    near_zero = (
        max(1.0, alpha) * (1 + 2 * dot) * c.omega_in * ((1 + c.u_q) * (1 + c.u_k) * operands + dims * c.omega_in)
    )
    return np.asarray(chain * magnitude + lost + near_zero)


def stored_scores_error(
    eps: Float64Array, size: Float64Array, alpha: float, contract: Contract, c: Constants
) -> Float64Array:
    """eps after scores of at most ``size`` were stored ``score_stores`` times, losing omega_S each time."""
    if not contract.scores.stores:
        return eps
    stores = contract.scores.stores
    return np.asarray(eps + np.expm1(stores * log1p(c.u_S)) * (size + eps) + stores * (1 + alpha) * c.omega_S)


def weight_error(
    eps: Float64Array, exponent: Float64Array, land: Landscape, contract: Contract, c: Constants
) -> Float64Array:
    """rho [r, n]: bound of |ln(1 + a_j)| for the weights of the computed softmax; zero where not visible."""
    rho = uneven_weight_error(eps, exponent, land, contract, c)
    return land.seen(rho + even_weight_error(land.keys, contract, c))


def even_weight_error(keys: int, contract: Contract, c: Constants) -> float:
    """The part of rho that is the same for every key, and in every row."""
    even = rescale_error(contract, c, keys) + _exponent_unit(c) * contract.sums.lag
    if contract.sums.row_sum == "rounded":
        even -= log1p(-c.u_P)
    if contract.sums.splits > 1:
        even += c.e_log * log(max(keys, 1)) + c.e_ln - log1p(-c.e_exp)
    return even


def uneven_weight_error(
    eps: Float64Array, exponent: Float64Array, land: Landscape, contract: Contract, c: Constants
) -> Float64Array:
    """The rest of rho: what follows the scores; ``exponent`` from `exponent_error`."""
    with np.errstate(all="ignore"):
        rho = exponent + eps
        if contract.sums.splits > 1:
            unit = 1.001 * c.u
            rho += np.maximum(land.size, land.max_size) * (MAX_ROUNDINGS * unit)
            rho += np.maximum(land.size, land.lse_size) * (LSE_ROUNDINGS * unit)
            rho += land.below_max * (EXPONENT_ROUNDINGS * unit)
            rho += (EXPONENT_ROUNDINGS * unit) * (land.log_total + log(max(land.keys, 1)))
        return rho


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """How far a sink, the last key of ``land``, stands from the other keys, and what its joining them may cost.

    top: maximum m_k of the other keys, an upper bound of |m_k| after it. apart: |s - m_k|. All [r, 1].
    """

    top: Float64Array
    top_size: Float64Array
    apart: Float64Array


def joined(land: Landscape) -> Joined:
    scores, real = land.scores[..., -1:], land.visible[..., :-1]
    top = np.where(real, land.scores[..., :-1], -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), scores, top)
    return Joined(top, np.abs(top) + land.slack, np.abs(scores - top) + 2 * land.slack)


def sink_error(land: Landscape, c: Constants) -> Float64Array:
    """What joins rho [r, n] because a sink, the last key, may join the others late.

    An error of e^(s - m_k) or of L_k, relative to the other side: it belongs to whichever side weighs less, because
    where the larger one sets the maximum its weight is exactly 1.
    """
    there = joined(land)
    n, spread = land.keys, log(max(land.keys, 2))
    roundings = EXPONENT_ROUNDINGS * (2 * there.apart + spread + 1)
    roundings = roundings + MAX_ROUNDINGS * there.top_size + LSE_ROUNDINGS * (there.top_size + spread)
    late = c.u * roundings + 2 * (-2 * log1p(-c.e_exp) + c.e_log * log(n + 1) + c.e_ln) + c.u_D * there.apart
    heavy = land.p[..., -1:] > 0.5
    last = np.arange(n) == n - 1
    return np.asarray(np.where(land.visible & (last != heavy), late, 0.0))


def sink_lse_error(land: Landscape, c: Constants) -> Float64Array:
    """What joins dL [r, 1] with a sink: L formed from L_k and s, and a larger s outside the maximum, while exp can."""
    there = joined(land)
    above = land.scores[..., -1:] + 2 * land.slack > there.top
    outside = c.u * (EXPONENT_ROUNDINGS * there.apart + MAX_ROUNDINGS * there.top_size) - log1p(-c.e_exp)
    outside = np.where(above & (there.apart <= log(c.compute.max_finite) + 1), outside, 0.0)
    return np.asarray(outside + c.u * (LSE_ROUNDINGS * land.lse_size + 3) + c.e_log + c.e_ln)


def _exponent_unit(c: Constants) -> float:
    return EXPONENT_ROUNDINGS * c.u * (1 + c.u_D) + c.u_D


def exponent_error(eps: Float64Array, land: Landscape, c: Constants) -> Float64Array:
    """What the roundings of an exponent S - m cost [r, n], but for the lag of a maximum."""
    with np.errstate(all="ignore"):
        lift = land.scores + land.scores_rad
        lift += eps
        top = land.seen(lift, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        overshoot = np.maximum(top - land.shift + land.slack, 0.0)
        error = np.add(land.below_max, eps, out=lift)
        error += overshoot
        error *= _exponent_unit(c)
        if c.omega_D:
            error += c.omega_D
        return error


def sweeps_apart(
    exponent: Float64Array, tilted: Tilted, land: Landscape, contract: Contract, c: Constants
) -> Float64Array | float:
    """Relative error [r, 1] of l, summed in an earlier sweep, against the weights that it divides in a normalised P.

    The scores are the same in both sweeps, but the first takes exp about running maxima and rescales; the second does
    not. Where nothing is rescaled the weights are the same numbers. ``exponent`` from `exponent_error`.
    """
    alone = -log1p(-c.e_exp)
    rescaled = rescale_error(contract, c, land.keys)
    if not contract.weights.normalised or rescaled <= alone:
        return 0.0
    with np.errstate(all="ignore"):
        apart = 2 * exponent
        apart += 2 * _exponent_unit(c) * contract.sums.lag + rescaled + alone
        apart = land.seen(apart)
        # Upper bounds of the shares of either sweep. Those below 2^-100 matter to neither.
        share = tilted.upper
        share *= tilted.gain
        np.minimum(share, 1.0, out=share)
        little = apart.max(axis=(-2, -1), keepdims=True, initial=0.0) <= SMALL
        (lost,) = chosen(little, lambda: (_faded(apart) * share,), lambda: (share * -np.expm1(-apart),))
        moved = lost.sum(axis=-1, keepdims=True)
        near = moved / (1 - np.minimum(moved, 0.5))
        if bool((moved < 0.5).all()):
            return np.asarray(near)
        widest = np.expm1(np.where(share > 2.0**-100, apart, 0.0).max(axis=-1, keepdims=True, initial=0.0))
        return np.asarray(np.where(moved < 0.5, near, widest + land.keys * 2.0**-98))


def _faded(x: Float64Array) -> Float64Array:
    """1 - e^-x <= x - x^2 / 2 + x^3 / 6, which is too much by less than 2^-28 of itself for a small x."""
    lost = x * (1.0 / 6)
    lost -= 0.5
    lost *= x
    lost += 1.0
    lost *= x
    return lost


@dataclass(frozen=True, slots=True, eq=False)
class Tilted:
    """The weights at their worst, T = p + ``moved``: what they move by, T F [r, n], and what a row gains, G [r, 1].

    even: an error of all weights alike that comes on top, of which p and moved do not know: with it
    T = e^even (p + moved) and T F = e^even moved + (e^even - 1) p. spent: sum p rho, with it; total: sum T F, with it.
    huge: rows where these exceed float64's comfort. drift: exponent of the largest weight, see
    `oracle.bounds.attention.overflow.drift`.
    """

    p: Float64Array
    moved: Float64Array
    top: Float64Array
    spent: Float64Array
    total: Float64Array
    gain: Float64Array
    huge: NDArray[np.bool_]
    even: float = 0.0
    drift: Float64Array | float = 0.0

    @property
    def upper(self) -> Float64Array:
        """T, a new array."""
        upper = self.p + self.moved
        if self.even:
            upper *= exp(self.even)
        return upper

    def lifted(self, even: float, p_total: Float64Array) -> Tilted:
        """With an error of all weights alike on top; p_total [r, 1] is sum p."""
        if even == 0:
            return self
        total = exp(even) * self.total + expm1(even) * p_total
        return _tilted(self.p, self.moved, self.top + even, self.spent + even * p_total, total, even=even)


def _tilted(
    p: Float64Array,
    moved: Float64Array,
    top: Float64Array,
    spent: Float64Array,
    total: Float64Array,
    *,
    even: float = 0.0,
) -> Tilted:
    huge = ~((top <= LARGEST_EXPONENT) & (spent <= LARGEST_EXPONENT))
    return Tilted(p, moved, top, spent, total, np.exp(np.minimum(spent, LARGEST_EXPONENT)), huge, even)


def tilt(rho: Float64Array, land: Landscape) -> Tilted:
    with np.errstate(all="ignore"):
        most = rho.max(axis=-1, keepdims=True, initial=0.0)
        largest = most.max(axis=-2, keepdims=True, initial=0.0)
        moved, spent, top = chosen(
            largest <= SMALL, lambda: _tilted_little(rho, land, most, largest), lambda: _tilted_far(rho, land)
        )
        return _tilted(land.p, moved, top, spent, moved.sum(axis=-1, keepdims=True))


def _tilted_little(
    rho: Float64Array, land: Landscape, most: Float64Array, largest: Float64Array
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """(moved, spent, top) of `Tilted` by a series.

    e^x - 1 <= x + x^2 / 2 + x^3 / (6 - 3 x / 2), which is too much by less than 2^-26 of itself.
    """
    moved = rho * (1.0 / (6 - 1.5 * largest))
    moved += 0.5
    moved *= rho
    moved += 1.0
    moved *= rho
    moved *= land.p
    spent = np.einsum("...ij,...ij->...i", land.p, rho)[..., None]
    return moved, spent, land.log_p.max(axis=-1, keepdims=True, initial=-np.inf) + most


def _tilted_far(rho: Float64Array, land: Landscape) -> tuple[Float64Array, Float64Array, Float64Array]:
    """The same for any rho."""
    exponent = land.seen(land.log_p + rho, -np.inf)
    spent = np.where(land.p > 0, land.p * rho, 0.0).sum(axis=-1, keepdims=True)
    moved = np.exp(np.minimum(exponent, LARGEST_EXPONENT)) * -np.expm1(-rho)
    return moved, spent, exponent.max(axis=-1, keepdims=True, initial=-np.inf)


def weights_part(tilted: Tilted, weighted: Float64Array, farthest: Float64Array) -> Float64Array:
    """W [r, Dv]: the error of O that wrong weights can cause, from sum T F |v - O|."""
    return np.asarray(np.where(tilted.huge, farthest, np.minimum(tilted.gain * weighted, farthest)))


def cast_part(tilted: Tilted, v_magnitude: Float64Array, largest: Float64Array) -> Float64Array:
    """Z [r, Dv]: an upper bound of sum p^a |v|, which the cast of P and the accumulation multiply."""
    return weights_part(tilted, tilted.upper @ v_magnitude, largest)


def cast_error(land: Landscape, contract: Contract, c: Constants) -> float:
    """kP: relative error of the cast of P, of v's operand rounding and of the accumulation (and of p's own
    division)."""
    cast = 0.0 if contract.sums.row_sum == "rounded" else c.u_P
    parts = [cast, c.u_v, accumulation_error(contract, c, land.keys)]
    if contract.weights.normalised:
        parts.append(c.u_div)
    if contract.sums.splits > 1:
        # Division of the partial output, its storage, its weight and the merge.
        parts += [c.u_div, c.u, c.g(contract.sums.splits + 2)]
    return compound(*parts)


def per_row_sum(tilted: Tilted, land: Landscape) -> Float64Array:
    """[r, 1]: upper bound of 1 / l as computed. G / l, or 1: the weight of the largest computed score is 1, but for a
    drift."""
    bound = np.where(tilted.huge, 1.0, np.minimum(tilted.gain * land.total_inverse, 1.0))
    return np.asarray(bound * np.exp(np.minimum(tilted.drift, LARGEST_EXPONENT)))


def underflow_part(tilted: Tilted, land: Landscape, found: Spread, contract: Contract, c: Constants) -> Float64Array:
    """U [r, Dv]: absolute errors of exp, of the cast of P and of products that underflow."""
    n = land.keys
    factor = per_row_sum(tilted, land)
    lost = found.distance if contract.sums.row_sum == "rounded" else found.size
    cast = c.omega_P * lost if contract.weights.normalised else factor * c.omega_P * lost
    lost = cast + factor * (c.w * found.distance + n * tiles(contract, n) * c.w_acc) + n * c.w_acc
    if contract.sums.splits > 1:
        # The share of a whole split may underflow in the merge.
        lost = lost + contract.sums.splits * c.w * found.farthest
    return np.asarray(lost)


def output_factor(land: Landscape, contract: Contract, c: Constants) -> float:
    """H: what the denominator, the division and the output rounding multiply the whole by."""
    h = row_sum_error(contract, c, land.keys)
    if h >= 1:
        return float("inf")
    division = 0.0 if contract.weights.normalised else c.u_div
    # O may be multiplied by 1 / (1 + e^(s - L_k)) at the end.
    late = (c.u_div, 2 * c.u) if land.sink else ()
    return compound(division, *[c.u_o] * contract.output.stores, h / (1 - h), *late) + land.keys * c.w


def with_output(c: Constants, fmt: Format) -> Constants:
    """The constants with the rounding of the output that was observed; a wider one can only be more exact."""
    return c if fmt.unit_roundoff <= c.u_o else replace(c, u_o=fmt.unit_roundoff, omega_o=max(c.omega_o, fmt.omega))


def out_bound(
    inner: Float64Array,
    out: Enclosure,
    land: Landscape,
    contract: Contract,
    c: Constants,
    *,
    apart: Float64Array | float = 0.0,
) -> Float64Array:
    """E + H (|O| + E) + omega_o; ``apart`` from `sweeps_apart`."""
    whole = output_factor(land, contract, c)
    # Not by adding a zero: a whole that is infinite would make it nan.
    factor = whole if isinstance(apart, float) else whole + apart * (1 + whole)
    lost = c.omega_o if contract.output.stores == 1 else contract.output.stores * c.omega_o * (1 + whole)
    return np.asarray(inner + factor * (out.upper_abs() + inner) + lost)


def lse_bound(
    tilted: Tilted, rho: Float64Array, land: Landscape, contract: Contract, c: Constants, fmt: Format
) -> Float64Array:
    """dL [r, 1] for an LSE returned in ``fmt``."""
    h = row_sum_error(contract, c, land.keys)
    if h >= 1:
        return np.full(land.max_size.shape, np.inf)
    with np.errstate(all="ignore"):
        lme, huge = np.log1p(tilted.total), tilted.huge
        if huge.any():
            # Clipping the exponent would be unsound: far rows use ln sum p e^rho through the largest exponent.
            exponent = land.seen(land.log_p + rho, -np.inf)
            top = exponent.max(axis=-1, keepdims=True, initial=-np.inf)
            far = top + np.log(np.exp(exponent - top).sum(axis=-1, keepdims=True)) + tilted.even
            lme = np.where(huge, np.maximum(far, 0.0), lme)
        bound = lme - log1p(-h) + land.keys * c.w + c.e_log * (land.log_total + lme + h) + c.e_ln
        bound = bound + c.u * (MAX_ROUNDINGS * land.max_size + LSE_ROUNDINGS * land.lse_size)
        if contract.sums.row_sum == "rounded":
            lost = per_row_sum(tilted, land) * land.keys * c.omega_P
            bound = bound + np.where(lost < 0.5, -np.log1p(-np.minimum(lost, 0.5)), np.inf)
        if contract.sums.splits > 1:
            bound = bound + (contract.sums.splits + 1) * c.u + LSE_ROUNDINGS * c.u * land.lse_size
        if land.sink:
            bound = bound + sink_lse_error(land, c)
        bound = bound * (1 + 8 * c.u)
        if fmt.precision < c.compute.precision:
            bound = bound + fmt.unit_roundoff * (land.lse_size + bound) + fmt.omega
        return np.asarray(bound)
