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
from math import log, log1p

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.contract.constants import Constants, accumulation_error, compound, rescale_error, row_sum_error, tiles
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array, Format

LARGEST_EXPONENT = 600.0
# Roundings of one score (scale constant, log2 e, product, multiply; bias and slope) and of its exponent, and of |m|,
# |L| in L.
SCORE_ROUNDINGS, SCORE_ROUNDINGS_WITH_BIAS, EXPONENT_ROUNDINGS = 6, 8, 6
MAX_ROUNDINGS, LSE_ROUNDINGS = 4, 3


@dataclass(frozen=True, slots=True, eq=False)
class Landscape:
    """Upper bounds of what one block's rows look like, from enclosures; all [r, n] or [r, 1], zero where not visible.

    slack: how far the true maximum of a row may lie from the shift. sink: whether the last key is one.
    """

    keys: int
    visible: NDArray[np.bool_]
    scores: Float64Array
    scores_rad: Float64Array
    size: Float64Array
    below_max: Float64Array
    log_p: Float64Array
    p: Float64Array
    shift: Float64Array
    max_size: Float64Array
    slack: Float64Array
    lse_size: Float64Array
    total_inverse: Float64Array
    log_total: Float64Array
    sink: bool = False


def landscape(block: Block) -> Landscape:
    """What the bounds need of a block that has parts scores [r, n], shift, total and lse [r, 1], perhaps a sink."""
    scores, shift = block.part("scores"), block.part("shift")
    total, lse = block.part("total"), block.part("whole_lse" if "whole_lse" in block.values else "lse")
    visible = block.visible_keys()
    if "sink" in block.values:
        # The last key is the sink: its value is 0.
        logit = block.part("sink")
        scores = Enclosure(*(np.hstack(pair) for pair in zip(scores.parts(), logit.parts(), strict=True)))
        visible = np.hstack([visible, np.ones((len(visible), 1), dtype=bool)])
    with np.errstate(all="ignore"):
        rad = np.where(visible, scores.rad, 0.0)
        slack = rad.max(axis=1, keepdims=True, initial=0.0)
        size = np.where(visible, scores.upper_abs(), 0.0)
        below = np.where(visible, np.maximum(shift.hi - scores.hi + rad + slack, 0.0) + 2.0**-52 * size, 0.0)
        lse_size = lse.upper_abs()
        # What the low parts of midpoints and the roundings of this line can move.
        log_p = scores.hi - lse.hi + rad + lse.rad + 2.0**-50 * (size + lse_size)
        lowest = np.maximum(total.hi - total.rad, 0.5)
        return Landscape(
            keys=visible.shape[1],
            visible=visible,
            scores=scores.hi,
            scores_rad=rad,
            size=size,
            below_max=below,
            log_p=np.where(visible, log_p, -np.inf),
            p=np.where(visible, np.exp(log_p), 0.0),
            shift=shift.hi,
            max_size=np.abs(shift.hi) + slack,
            slack=slack,
            lse_size=lse_size,
            total_inverse=1.0 / lowest,
            log_total=np.maximum(np.log(total.upper_abs()), 0.0) + slack,
            sink="sink" in block.values,
        )


def inflation(land: Landscape, inner: int) -> float:
    """Covers the float64 roundings of evaluating the bound itself."""
    return 1.0 + 2.0**-52 * (land.keys + inner + 512)


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
    if not contract.score_stores:
        return eps
    stores = contract.score_stores
    return np.asarray(eps + np.expm1(stores * log1p(c.u_S)) * (size + eps) + stores * (1 + alpha) * c.omega_S)


def weight_error(eps: Float64Array, land: Landscape, contract: Contract, c: Constants) -> Float64Array:
    """rho [r, n]: bound of |ln(1 + a_j)| for the weights of the computed softmax; zero where not visible."""
    with np.errstate(all="ignore"):
        rho = eps + _exponent_error(eps, land, contract, c)
        rho = rho + rescale_error(contract, c, land.keys)
        if contract.row_sum == "rounded":
            rho = rho - log1p(-c.u_P)
        if contract.splits > 1:
            far = np.maximum(land.size, land.max_size), np.maximum(land.size, land.lse_size)
            fall = land.below_max + land.log_total
            rho = rho + 1.001 * c.u * (
                MAX_ROUNDINGS * far[0] + LSE_ROUNDINGS * far[1] + EXPONENT_ROUNDINGS * (fall + log(max(land.keys, 1)))
            )
            rho = rho + c.e_log * log(max(land.keys, 1)) + c.e_ln - log1p(-c.e_exp)
        return np.where(land.visible, rho, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """How far a sink, the last key of ``land``, stands from the other keys, and what its joining them may cost.

    top: maximum m_k of the other keys, an upper bound of |m_k| after it. apart: |s - m_k|. All [r, 1].
    """

    top: Float64Array
    top_size: Float64Array
    apart: Float64Array


def joined(land: Landscape) -> Joined:
    scores, real = land.scores[:, -1:], land.visible[:, :-1]
    top = np.where(real, land.scores[:, :-1], -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
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
    heavy = land.p[:, -1:] > 0.5
    last = np.arange(n) == n - 1
    return np.asarray(np.where(land.visible & (last != heavy), late, 0.0))


def sink_lse_error(land: Landscape, c: Constants) -> Float64Array:
    """What joins dL [r, 1] with a sink: L formed from L_k and s, and a larger s outside the maximum, while exp can."""
    there = joined(land)
    above = land.scores[:, -1:] + 2 * land.slack > there.top
    outside = c.u * (EXPONENT_ROUNDINGS * there.apart + MAX_ROUNDINGS * there.top_size) - log1p(-c.e_exp)
    outside = np.where(above & (there.apart <= log(c.compute.max_finite) + 1), outside, 0.0)
    return np.asarray(outside + c.u * (LSE_ROUNDINGS * land.lse_size + 3) + c.e_log + c.e_ln)


def _exponent_error(eps: Float64Array, land: Landscape, contract: Contract, c: Constants) -> Float64Array:
    lift = np.where(land.visible, land.scores + land.scores_rad + eps, -np.inf) - land.shift + land.slack
    overshoot = np.maximum(np.max(lift, axis=1, keepdims=True, initial=-np.inf), 0.0)
    unit = EXPONENT_ROUNDINGS * c.u * (1 + c.u_D) + c.u_D
    return np.asarray(unit * (land.below_max + contract.lag + eps + overshoot) + c.omega_D)


def sweeps_apart(
    eps: Float64Array, rho: Float64Array, land: Landscape, contract: Contract, c: Constants
) -> Float64Array | float:
    """Relative error [r, 1] of l, summed in an earlier sweep, against the weights that it divides in a normalised P.

    The scores are the same in both sweeps, but the first takes exp about running maxima and rescales; the second does
    not. Where nothing is rescaled the weights are the same numbers.
    """
    alone = -log1p(-c.e_exp)
    rescaled = rescale_error(contract, c, land.keys)
    if not contract.normalised_p or rescaled <= alone:
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.where(land.visible, 2 * _exponent_error(eps, land, contract, c) + rescaled + alone, 0.0)
        spent = np.where(land.p > 0, land.p * rho, 0.0).sum(axis=1, keepdims=True)
        # Upper bounds of the shares of either sweep. Those below 2^-100 matter to neither.
        share = np.where(land.visible, np.exp(np.minimum(land.log_p + rho + spent, 0.0)), 0.0)
        moved = (share * -np.expm1(-apart)).sum(axis=1, keepdims=True)
        widest = np.expm1(np.where(share > 2.0**-100, apart, 0.0).max(axis=1, keepdims=True, initial=0.0))
        near = moved / (1 - np.minimum(moved, 0.5))
        return np.asarray(np.where(moved < 0.5, near, widest + land.keys * 2.0**-98))


@dataclass(frozen=True, slots=True, eq=False)
class Tilted:
    """The weights at their worst: upper T [r, n], T F [r, n], G [r, 1], and rows where these exceed float64's
    comfort."""

    upper: Float64Array
    moved: Float64Array
    gain: Float64Array
    huge: NDArray[np.bool_]


def tilt(rho: Float64Array, land: Landscape) -> Tilted:
    with np.errstate(all="ignore"):
        exponent = np.where(land.visible, land.log_p + rho, -np.inf)
        spent = np.where(land.p > 0, land.p * rho, 0.0).sum(axis=1, keepdims=True)
        top = exponent.max(axis=1, keepdims=True, initial=-np.inf)
        huge = ~((top <= LARGEST_EXPONENT) & (spent <= LARGEST_EXPONENT))
        upper = np.exp(np.minimum(exponent, LARGEST_EXPONENT))
        return Tilted(upper, upper * -np.expm1(-rho), np.exp(np.minimum(spent, LARGEST_EXPONENT)), huge)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Sums over visible keys per output: sum w |v - O| for each given w, sum |v - O|, max |v - O|, sum |v|, max |v|.

    All are upper bounds; `distance` is one from max |v - O| or from sum |v| and O, whichever is less.
    """

    weighted: list[Float64Array]
    distance: Float64Array
    farthest: Float64Array
    size: Float64Array
    largest: Float64Array


def spread(v: Float64Array, out: Enclosure, weights: list[Float64Array], visible: NDArray[np.bool_]) -> Spread:
    """v [n, Dv], out [r, Dv], each weight [r, n] (zero where not visible) -> all [r, Dv]."""
    rows, width = out.hi.shape
    across, magnitude = np.ascontiguousarray(v.T), np.abs(v)
    size = visible.astype(np.float64) @ magnitude
    count = visible.sum(axis=1, keepdims=True)
    high, low = _extremes(across, visible)
    reach = out.rad + np.abs(out.lo)
    largest = np.where(count > 0, np.maximum(np.abs(high), np.abs(low)), 0.0)
    farthest = np.where(count > 0, np.maximum(high - out.hi, out.hi - low) + reach, 0.0)
    # |v - O| = 2 max(v, O) - v - O, so that one pass a row is enough; one row at a time, along the keys, stays in
    # cache.
    raised, larger = [np.empty((rows, width)) for _ in weights], np.empty_like(across)
    for i in range(rows):
        np.maximum(across, out.hi[i, :, None], out=larger)
        for sums, weight in zip(raised, weights, strict=True):
            sums[i] = larger @ weight[i]
    weighted = []
    for sums, weight in zip(raised, weights, strict=True):
        whole = weight.sum(axis=1, keepdims=True)
        # What the three sums may have rounded off, and then cancelled.
        slack = 2.0**-50 * (len(v) + 8) * (weight @ magnitude + whole * np.abs(out.hi))
        weighted.append(np.maximum(2 * sums - weight @ v - whole * out.hi, 0.0) + slack + whole * reach)
    distance = np.minimum(size + count * (np.abs(out.hi) + reach), count * farthest)
    return Spread(weighted, distance, farthest, size, largest)


def _extremes(across: Float64Array, visible: NDArray[np.bool_]) -> tuple[Float64Array, Float64Array]:
    """Largest and smallest visible entry: across [Dv, n], visible [r, n] -> two of [r, Dv]; -inf and inf for an empty
    row."""
    rows, n = visible.shape
    high, low = np.full((rows, len(across)), -np.inf), np.full((rows, len(across)), np.inf)
    count = np.asarray(visible.sum(axis=1))
    last = np.where(count > 0, n - np.argmax(visible[:, ::-1], axis=1), 0)
    whole, run = count == n, (count == last) & (count > 0) & (count < n)
    if whole.any():
        high[whole], low[whole] = across.max(axis=1, initial=-np.inf), across.min(axis=1, initial=np.inf)
    if run.any():
        # Keys from the first on, as under a causal mask: running extremes serve all rows.
        high[run] = np.maximum.accumulate(across, axis=1)[:, count[run] - 1].T
        low[run] = np.minimum.accumulate(across, axis=1)[:, count[run] - 1].T
    for i in np.flatnonzero(~whole & ~run & (count > 0)):
        seen = across[:, visible[i]]
        high[i], low[i] = seen.max(axis=1), seen.min(axis=1)
    return high, low


def weights_part(tilted: Tilted, weighted: Float64Array, farthest: Float64Array) -> Float64Array:
    """W [r, Dv]: the error of O that wrong weights can cause."""
    with np.errstate(all="ignore"):
        return np.asarray(np.where(tilted.huge, farthest, np.minimum(tilted.gain * weighted, farthest)))


def cast_part(tilted: Tilted, v_magnitude: Float64Array, largest: Float64Array) -> Float64Array:
    """Z [r, Dv]: an upper bound of sum p^a |v|, which the cast of P and the accumulation multiply."""
    with np.errstate(all="ignore"):
        product = tilted.gain * (tilted.upper @ v_magnitude)
        return np.asarray(np.where(tilted.huge, largest, np.minimum(product, largest)))


def cast_error(land: Landscape, contract: Contract, c: Constants) -> float:
    """kP: relative error of the cast of P, of v's operand rounding and of the accumulation (and of p's own
    division)."""
    cast = 0.0 if contract.row_sum == "rounded" else c.u_P
    parts = [cast, c.u_v, accumulation_error(contract, c, land.keys)]
    if contract.normalised_p:
        parts.append(c.u_div)
    if contract.splits > 1:
        # Division of the partial output, its storage, its weight and the merge.
        parts += [c.u_div, c.u, c.g(contract.splits + 2)]
    return compound(*parts)


def _per_row_sum(tilted: Tilted, land: Landscape) -> Float64Array:
    """[r, 1]: upper bound of 1 / l as computed. G / l, or 1: the weight of the largest computed score is exactly 1."""
    with np.errstate(all="ignore"):
        return np.asarray(np.where(tilted.huge, 1.0, np.minimum(tilted.gain * land.total_inverse, 1.0)))


def underflow_part(tilted: Tilted, land: Landscape, found: Spread, contract: Contract, c: Constants) -> Float64Array:
    """U [r, Dv]: absolute errors of exp, of the cast of P and of products that underflow."""
    n = land.keys
    factor = _per_row_sum(tilted, land)
    lost = found.distance if contract.row_sum == "rounded" else found.size
    cast = c.omega_P * lost if contract.normalised_p else factor * c.omega_P * lost
    lost = cast + factor * (c.w * found.distance + n * tiles(contract, n) * c.w_acc) + n * c.w_acc
    if contract.splits > 1:
        # The share of a whole split may underflow in the merge.
        lost = lost + contract.splits * c.w * found.farthest
    return np.asarray(lost)


def output_factor(land: Landscape, contract: Contract, c: Constants) -> float:
    """H: what the denominator, the division and the output rounding multiply the whole by."""
    h = row_sum_error(contract, c, land.keys)
    if h >= 1:
        return float("inf")
    division = 0.0 if contract.normalised_p else c.u_div
    # O may be multiplied by 1 / (1 + e^(s - L_k)) at the end.
    late = (c.u_div, 2 * c.u) if land.sink else ()
    return compound(division, *[c.u_o] * contract.output_stores, h / (1 - h), *late) + land.keys * c.w


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
    lost = c.omega_o if contract.output_stores == 1 else contract.output_stores * c.omega_o * (1 + whole)
    return np.asarray(inner + factor * (out.upper_abs() + inner) + lost)


def lse_bound(
    tilted: Tilted, rho: Float64Array, land: Landscape, contract: Contract, c: Constants, fmt: Format
) -> Float64Array:
    """dL [r, 1] for an LSE returned in ``fmt``."""
    h = row_sum_error(contract, c, land.keys)
    if h >= 1:
        return np.full(land.max_size.shape, np.inf)
    with np.errstate(all="ignore"):
        lme = np.log1p(tilted.moved.sum(axis=1, keepdims=True))
        # Clipping the exponent would be unsound: far rows use ln sum p e^rho through the largest exponent.
        exponent = np.where(land.visible, land.log_p + rho, -np.inf)
        top = exponent.max(axis=1, keepdims=True, initial=-np.inf)
        far = top + np.log(np.exp(exponent - top).sum(axis=1, keepdims=True))
        lme = np.where(tilted.huge, np.maximum(far, 0.0), lme)
        bound = lme - log1p(-h) + land.keys * c.w + c.e_log * (land.log_total + lme + h) + c.e_ln
        bound = bound + c.u * (MAX_ROUNDINGS * land.max_size + LSE_ROUNDINGS * land.lse_size)
        if contract.row_sum == "rounded":
            lost = _per_row_sum(tilted, land) * land.keys * c.omega_P
            bound = bound + np.where(lost < 0.5, -np.log1p(-np.minimum(lost, 0.5)), np.inf)
        if contract.splits > 1:
            bound = bound + (contract.splits + 1) * c.u + LSE_ROUNDINGS * c.u * land.lse_size
        if land.sink:
            bound = bound + sink_lse_error(land, c)
        bound = bound * (1 + 8 * c.u)
        if fmt.precision < c.compute.precision:
            bound = bound + fmt.unit_roundoff * (land.lse_size + bound) + fmt.omega
        return np.asarray(bound)
