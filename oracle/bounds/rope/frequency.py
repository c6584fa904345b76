"""How wrong a rotary frequency, and the magnitude of cos and sin, may be: relative errors from counted roundings.

u is the unit roundoff of the format in which frequencies are made, V(n) = (1 + u)^n - 1, t = 2i/d.

    plain      e_0 = (1 + u)^5 exp(t (((1 + u)^4 - 1) |ln base| + dbase)) - 1, and 0 for the first pair
    linear,    (1 + e_0)(1 + u)^5 - 1: the factor, rounded, and a division (or a reciprocal and a product); for
    longrope   the first pair too, and wherever it happens (on positions, or on base^t)
    dynamic    e_0 with the new base b' = base r^(d/(d-2)) and dbase = dln b' below
    yarn,      (1 + e_0)(1 + u)^7 (1 + (d_1/s + d_2)/B) - 1,   B = (1 - w)/s + w,  d_2 = dw + u,  d_1 = d_2 + u
    llama3     (d_1 = d_2 = 0 where w is surely clamped)

- A power or exponential to 2 ulp and a reciprocal make five roundings; an exponent -t ln base is rounded at most four
  times: t, ln base to one ulp, their product.
- dbase is ln(1 + u) if the format does not hold the base, else 0.
- dln b' = d/(d-2) (-ln(1 - dr/r) + V(3) |ln r|) + V(6), dr = V(8) s L'/L + V(2) |s - 1| + u r: the two parts of r
  nearly cancel for L' near L; the exponent d/(d-2), the power and its product with the base follow.
- The share w of the unscaled frequency. In rotations x = L theta/(2 pi): dx = x ((1 + e_0)(1 + u)^10 - 1), for 2 pi,
  L and two divisions (the wavelength 2 pi/theta, then L by it); w = (x - lo)/(hi - lo) with rounded lo, hi,
  differences and a division. Its error enters both terms with opposite signs, so a small factor 1/s of the sum
  magnifies it: B >= 1/s only. That is why a flat number of roundings (8u, 12u) does not hold.
- By dimension: w of the two borders moved by what d ln(L/(2 pi beta))/(2 ln base) may lose in this format (V(6) |low|
  and the errors of both logarithms), rounded to integers after that where truncated, so that a border next to an
  integer may fall to either side; then V(6) for the ramp itself.
- A division counts 4u, a logarithm 4u relative and 2^2.6 u absolute, as everywhere (docs/bounds.md, section 1).

The magnitude A, e_A: a given one is rounded once. 1 + y, y = m ln(s)/10: dy = V(8) y + 6.1 u |m|/10 (two constants, two
products, the logarithm), one sum; a quotient of two adds a division. sqrt(1 + ln s/ln L): the two logarithms and a
division, a sum, and a square root, which halves what went before it. A softmax scale times (1 + y)^2: twice the
error of 1 + y, and two products.
"""

from __future__ import annotations

from math import expm1, inf, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.formats import Float64Array, Format
from oracle.ops.rope import formula as rope
from oracle.ops.rope import scaling as rope_scaling
from oracle.ops.rope.scaling import Magnitude, Scaling

# Roundings of a frequency's function and of its exponent; those of a division; the absolute error of a logarithm.
POWER, EXPONENT, DIVISION = 5, 4, 4
LOG, LOG_ABSOLUTE = 4, 2.0**2.6
SCALED, BLENDED, ROTATIONS, RATIO = DIVISION + 1, DIVISION + 3, 2 * DIVISION + 2, DIVISION + 4
BITS = 160


def many(n: float, u: float) -> float:
    """(1 + u)^n - 1."""
    return expm1(n * log1p(u))


def frequencies_upper(base: float, rotary_dim: int, scaling: Scaling, length: int) -> Float64Array:
    """Upper bounds of theta [1, d/2] in float64."""
    ar = arb_arithmetic(BITS)
    with ar.working():
        hi, lo, rad = ar.to_enclosure(rope.frequencies(ar, base, rotary_dim, scaling=scaling, length=length))
    return np.asarray((np.abs(hi) + np.abs(lo) + rad) * (1 + 2.0**-50))


def frequency_error(base: float, rotary_dim: int, scaling: Scaling, length: int, fmt: Format) -> Float64Array:
    """[1, d/2]: the largest relative error of each frequency made in ``fmt``; inf where nothing is promised."""
    found = _error(base, rotary_dim, scaling, length, fmt)
    return np.where(_overflows(base, rotary_dim, scaling, length, fmt), inf, found)


def _error(base: float, rotary_dim: int, scaling: Scaling, length: int, fmt: Format) -> Float64Array:
    u = fmt.unit_roundoff
    t = _exponents(rotary_dim)
    inexact = log1p(u) if float(fmt.round(base)) != base else 0.0
    if scaling.kind == "dynamic":
        loss = _base_loss(scaling, length, rotary_dim, u)
        return _plain(t, abs(log(base)) + _base_growth(scaling, length, rotary_dim), inexact + loss, u)
    plain = _plain(t, abs(log(base)), inexact, u)
    match scaling.kind:
        case "linear" | "longrope":
            return np.asarray((1 + plain) * (1 + many(SCALED, u)) - 1)
        case "yarn" | "llama3":
            return _blended(base, rotary_dim, scaling, plain, u)
    return plain


def _exponents(rotary_dim: int) -> Float64Array:
    return np.asarray(np.arange(rotary_dim // 2)[None, :] * (2.0 / rotary_dim), dtype=np.float64)


def _overflows(base: float, rotary_dim: int, scaling: Scaling, length: int, fmt: Format) -> NDArray[np.bool_]:
    """Where a parameter, base^t times its factor, or a wavelength is beyond the largest number of the format."""
    if scaling.kind == "default":
        return np.zeros((1, rotary_dim // 2), dtype=bool)
    grown, factors = log(base), np.array([max(1.0, float(scaling.factor))])
    if scaling.kind == "dynamic":
        grown += _base_growth(scaling, length, rotary_dim)
    if scaling.kind == "longrope":
        factors = np.array([max(1.0, float(x)) for x in rope_scaling.list_of(scaling, length)])
    reach = np.maximum(_exponents(rotary_dim) * grown, 0.0) + np.log(factors)
    if scaling.in_rotations:
        reach = reach + log(2 * np.pi)
    largest = max(abs(grown), log(float(scaling.factor) * max(length, scaling.length, 1)))
    return np.asarray(np.maximum(reach, largest) >= log(fmt.max_finite) - 2.0**-20)


def _base_growth(scaling: Scaling, length: int, rotary_dim: int) -> float:
    return rotary_dim / (rotary_dim - 2) * log(float(rope_scaling.base_ratio(scaling, length)))


def _plain(t: Float64Array, log_base: float, inexact: float, u: float) -> Float64Array:
    # 0 times inf is at the first pair, which is exact.
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.expm1(POWER * log1p(u) + t * (many(EXPONENT, u) * log_base + inexact))
    return np.asarray(np.where(t == 0, 0.0, found))


def _base_loss(scaling: Scaling, length: int, rotary_dim: int, u: float) -> float:
    """dln b' of the dynamic rule."""
    ratio = float(rope_scaling.base_ratio(scaling, length))
    s = float(scaling.factor)
    stretched = s * max(length, scaling.length) / scaling.length
    lost = (many(RATIO, u) * stretched + many(2, u) * abs(s - 1) + u * ratio) / ratio
    if lost >= 1:
        return inf
    return rotary_dim / (rotary_dim - 2) * (-log1p(-lost) + many(3, u) * log(ratio)) + many(6, u)


def _blended(base: float, rotary_dim: int, scaling: Scaling, plain: Float64Array, u: float) -> Float64Array:
    ar = arb_arithmetic(BITS)
    with ar.working():
        theta = ar.power(base, -2 * np.arange(rotary_dim // 2), rotary_dim)
        share = ar.to_enclosure(rope_scaling.kept_share(ar, theta, base, rotary_dim, scaling))[0]
        angular = ar.to_enclosure(theta)[0]
    s = float(scaling.factor)
    whole = (1 - share) / s + share
    if scaling.in_rotations:
        lost = _rotations_lost(scaling, angular, plain, u)
    else:
        lost = _dimensions_lost(base, rotary_dim, scaling, share, u)
    second = np.where(lost > 0, lost + u, 0.0)
    first = np.where(lost > 0, lost + 2 * u, 0.0)
    with np.errstate(all="ignore"):
        found = (1 + plain) * (1 + many(BLENDED, u)) * (1 + (first / s + second) / whole) - 1
    return np.asarray(found * (1 + 2.0**-40))


def _rotations_lost(scaling: Scaling, theta: Float64Array, plain: Float64Array, u: float) -> Float64Array:
    """dw of a ramp in rotations; 0 where w is clamped whatever was lost."""
    low, high = float(scaling.slow), float(scaling.fast)
    x = scaling.length * theta / (2 * np.pi)
    width = high - low
    above = x * ((1 + plain) * (1 + many(ROTATIONS, u)) - 1) + u * low
    above = above * (1 + u) + u * np.abs(x - low)
    narrow = u + (1 + u) * u * (high + low) / width
    if narrow >= 1:
        return np.full(x.shape, inf)
    w = np.abs(x - low) / width
    lost = (w + above / width) * (1 + many(DIVISION, u)) / (1 - narrow) - w
    inside = (x - low > -lost * width) & (x - high < lost * width)
    return np.where(inside, np.minimum(lost, 1.0), 0.0)


def _dimensions_lost(base: float, rotary_dim: int, scaling: Scaling, share: Float64Array, u: float) -> Float64Array:
    """dw of a ramp by the number of the pair."""
    pair = np.arange(rotary_dim // 2)[None, :].astype(np.float64)
    lows, highs = (
        _border(base, rotary_dim, scaling, beta, u, upward=up)
        for beta, up in ((float(scaling.fast), False), (float(scaling.slow), True))
    )
    moved = np.zeros(share.shape)
    for low in lows:
        for high in highs:
            low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
            end = high + float(rope_scaling.SINGULAR) if high == low else high
            if end <= low:
                return np.full(share.shape, 1.0)
            other = 1 - np.clip((pair - low) / (end - low), 0.0, 1.0)
            moved = np.maximum(
                moved, np.abs(other - share) + 2.0**-49 * (1 + low + pair) / (end - low) * (other > 0) * (other < 1)
            )
    return np.asarray(moved + np.where((share > 0) & (share < 1), (1 - share) * many(DIVISION + 2, u), 0.0))


def _border(
    base: float, rotary_dim: int, scaling: Scaling, beta: float, u: float, *, upward: bool
) -> tuple[float, ...]:
    """Where a border of the ramp may lie: the ends of its range, as integers if truncated."""
    rotations = log(scaling.length / (2 * np.pi * beta))
    lost = many(RATIO, u) + LOG * u * abs(rotations) + LOG_ABSOLUTE * u
    below = u + LOG * u * log(base) + LOG_ABSOLUTE * u
    if below >= log(base):
        return -inf, inf
    middle = rotary_dim / 2 * rotations / log(base)
    reach = (abs(rotations) + lost) / (log(base) - below) - abs(rotations) / log(base)
    reach = rotary_dim / 2 * reach * (1 + many(6, u)) + abs(middle) * many(6, u)
    ends = middle - reach, middle + reach
    if not scaling.truncate:
        return ends
    return tuple(float(np.ceil(x) if upward else np.floor(x)) for x in ends)


def magnitude_of(scaling: Scaling, u: float) -> tuple[float, float]:
    """(A, e_A): an upper bound of the magnitude and its relative error with unit roundoff u; (1, 0) for none."""
    ar = arb_arithmetic(BITS)
    with ar.working():
        size = rope_scaling.magnitude(ar, scaling)
        if size is None:
            return 1.0, 0.0
        value = float(ar.to_enclosure(size)[0][0, 0]) * (1 + 2.0**-50)
    return value, _magnitude_error(scaling, u)


def _magnitude_error(scaling: Scaling, u: float) -> float:
    how: Magnitude = scaling.magnitude
    factor = float(scaling.factor)
    match how.rule:
        case "given":
            return u
        case "yarn":
            parts = [_tempered(factor, float(m), u) for m in (how.numerator, how.denominator) if m]
            whole = sum(log1p(part) for part in parts) + (DIVISION * log1p(u) if len(parts) == 2 else 0.0)
            return float(expm1(whole + log1p(u)))
    if factor <= 1:
        return 0.0
    logs = [log(factor), log(scaling.length)]
    wrong = [LOG * u + LOG_ABSOLUTE * u / x for x in logs]
    if wrong[1] >= 1:
        return inf
    quotient = (1 + wrong[0]) / (1 - wrong[1]) * (1 + many(DIVISION + 1, u)) - 1
    grown = logs[0] / logs[1]
    return sqrt(1 + grown / (1 + grown) * quotient) * (1 + many(2.5, u)) - 1


def softmax_factor_error(scaling: Scaling, u: float) -> float:
    """Relative error of a scale that was multiplied by `rope_scaling.softmax_factor`; 0 where it is not."""
    if scaling.factor <= 1 or scaling.all_dim == 0:
        return 0.0
    return expm1(2 * log1p(_tempered(float(scaling.factor), float(scaling.all_dim), u)) + 2 * log1p(u))


def _tempered(factor: float, m: float, u: float) -> float:
    """Relative error of 1 + m ln(s)/10; a sum of a positive number."""
    if factor <= 1:
        return 0.0
    y = m * log(factor) / 10
    lost: float = many(LOG + 4, u) * y + LOG_ABSOLUTE * u * m / 10
    return lost / (1 + y) + 2 * u
