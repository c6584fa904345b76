"""Scaled rotary frequencies: position interpolation, dynamic NTK, YaRN, Llama 3, LongRoPE; M-RoPE's sections.

theta_i = base^(-2i/d), i = 0 .. d/2 - 1; L is the context length of the pre-training, s the factor, L' the length
of the sequence at hand. Each rule as published and as transformers 5 computes it; where the two differ, a key of
the parameters says which is meant (`oracle.ops.rope.parameters`).

    linear    theta_i / s                                             (Chen et al. 2023, arXiv 2306.15595)
    dynamic   (base r^(d/(d-2)))^(-2i/d),  r = s max(L', L)/L - (s - 1)
              (bloc97 and emozilla's "dynamic NTK"; with s = 1 the rule of section 3.4 of the YaRN paper)
    yarn      w_i theta_i + (1 - w_i) theta_i / s                     (Peng et al. 2023, arXiv 2309.00071)
              ramp "dimension", the authors' code: w_i = 1 - clamp((i - low)/(high - low)), low and high the pair
              numbers d ln(L/(2 pi beta))/(2 ln base) for beta_fast and beta_slow, rounded outwards if `truncate`,
              kept inside 0 .. d - 1; where both are equal, high is 0.001 larger
              ramp "rotations", equation 18 of the paper: w_i = clamp((L theta_i/(2 pi) - beta_slow)/(beta_fast -
              beta_slow))
    llama3    the same sum, w_i = clamp((L theta_i/(2 pi) - low_freq_factor)/(high_freq_factor - low_freq_factor))
              (Llama 3.1's model code)
    longrope  theta_i / lambda_i, the long list of factors for L' > L, else the short one (Ding et al. 2024, arXiv
              2402.13753, without its first tokens that stay as they are, which no released model uses)

The magnitude multiplies cos and sin. yarn: (1 + m_1 ln(s)/10)/(1 + m_2 ln(s)/10), each 1 for s <= 1, m_1 = 1 and
m_2 = 0 unless stated (the paper's sqrt(1/t) on queries and keys alike). longrope: sqrt(1 + ln(s)/ln(L)), 1 for
s <= 1. An `attention_factor` replaces either.

DeepSeek-V2's and V3's attention also multiplies its softmax scale by (1 + m_2 ln(s)/10)^2 where `mscale_all_dim` = m_2
is given and not 0 (`softmax_factor`), whatever multiplies cos and sin.

M-RoPE (Qwen2-VL, arXiv 2409.12191): each pair turns by one of three positions, temporal, height or width.
In sections, the first t pairs by the first, the next h by the second, the last w by the third; interleaved
(Qwen3-VL), pair i by the height if i mod 3 = 1 and i < 3h, by the width if i mod 3 = 2 and i < 3w, else by time.

Every constant is an exact rational. `clamp` decides only what the enclosure decides: where a ball holds a border,
the ball itself holds both the value and the border, so it encloses the clamped value as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.base import Arithmetic, V

SINGULAR = Fraction(1, 1000)
# Enough for the integer part of any correction dimension, which is never an integer (pi is transcendental).
RANGE_BITS = 400


@dataclass(frozen=True, slots=True)
class Magnitude:
    """What multiplies cos and sin.

    rule: ``none``, ``given`` (value), ``yarn`` (numerator and denominator are the factors m of ln s / 10),
    ``longrope``.
    """

    rule: str = "none"
    value: Fraction = Fraction(1)
    numerator: Fraction = Fraction(1)
    denominator: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """One set of parameters, checked and hashable.

    kind: ``default`` and the rules above. factor: s. length: L. slow, fast: beta_slow and beta_fast, or
    low_freq_factor and high_freq_factor. ramp, truncate: yarn's. short, long: longrope's factors, d/2 each.
    seq_len: L' as a number, or whose largest position gives it: the whole ``call``'s or each ``sequence``'s own.
    all_dim: yarn's mscale_all_dim as it stands, 0 where there is none.
    sections: pairs of time, height and width (None: one position for all); interleaved: in turns.
    """

    kind: str = "default"
    factor: Fraction = Fraction(1)
    length: int = 0
    slow: Fraction = Fraction(1)
    fast: Fraction = Fraction(32)
    ramp: str = "dimension"
    truncate: bool = True
    short: tuple[Fraction, ...] = ()
    long: tuple[Fraction, ...] = ()
    seq_len: int | str = "call"
    magnitude: Magnitude = Magnitude()
    all_dim: Fraction = Fraction(0)
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    @property
    def in_rotations(self) -> bool:
        """Whether the frequencies are blended along the number of their rotations within L."""
        return self.kind == "llama3" or (self.kind == "yarn" and self.ramp == "rotations")


PLAIN = Scaling()


def number(ar: Arithmetic[V], x: Fraction) -> V:
    return ar.rational(x.numerator, x.denominator)


def row(ar: Arithmetic[V], values: list[Fraction]) -> V:
    return ar.hstack([number(ar, x) for x in values])


def clamp(ar: Arithmetic[V], x: V) -> V:
    """x where it may lie in 0 .. 1; 0 or 1 where it is surely beyond."""
    one = ar.rational(1, 1)
    return ar.select(_negative(ar, x), ar.rational(0, 1), ar.select(_negative(ar, ar.sub(one, x)), one, x))


def _negative(ar: Arithmetic[V], x: V) -> NDArray[np.bool_]:
    hi, lo, rad = ar.to_enclosure(x)
    return np.asarray((hi < 0) & (np.abs(hi) > np.abs(lo) + 2 * rad))


def base_ratio(scaling: Scaling, length: int) -> Fraction:
    """dynamic: r, by whose power d/(d-2) the base grows."""
    longest = max(length, scaling.length)
    return scaling.factor * Fraction(longest, scaling.length) - (scaling.factor - 1)


def list_of(scaling: Scaling, length: int) -> tuple[Fraction, ...]:
    """longrope: the factors in use."""
    return scaling.long if length > scaling.length else scaling.short


def correction_dimension(ar: Arithmetic[V], scaling: Scaling, beta: Fraction, base: float, rotary_dim: int) -> V:
    """yarn: the pair number (a real one) whose frequency rotates beta times within L."""
    rotations = ar.div(number(ar, scaling.length / (2 * beta)), ar.pi())
    logarithm = ar.log(number(ar, Fraction(base)))
    return ar.div(ar.mul(number(ar, Fraction(rotary_dim, 2)), ar.log(rotations)), logarithm)


@lru_cache(maxsize=256)
def integer_range(scaling: Scaling, base: float, rotary_dim: int) -> tuple[Fraction, Fraction]:
    """yarn with truncation: low and high, the borders of the ramp."""
    ar = arb_arithmetic(RANGE_BITS)
    with ar.working():
        low, high = (correction_dimension(ar, scaling, beta, base, rotary_dim) for beta in (scaling.fast, scaling.slow))
        first, last = int(low[0, 0].floor().unique_fmpz()), int(high[0, 0].ceil().unique_fmpz())
    first, last = max(first, 0), min(last, rotary_dim - 1)
    return Fraction(first), last + (SINGULAR if first == last else Fraction(0))


def real_range(ar: Arithmetic[V], scaling: Scaling, base: float, rotary_dim: int) -> tuple[V, V]:
    """yarn without truncation."""
    low, high = (correction_dimension(ar, scaling, beta, base, rotary_dim) for beta in (scaling.fast, scaling.slow))
    last = ar.rational(rotary_dim - 1, 1)
    low = ar.select(_negative(ar, low), ar.rational(0, 1), low)
    return low, ar.select(_negative(ar, ar.sub(last, high)), last, high)


def has_ramp(scaling: Scaling, base: float, rotary_dim: int) -> bool:
    """yarn by dimension: whether the ramp does not end before it starts."""
    if scaling.truncate:
        low, high = integer_range(scaling, base, rotary_dim)
        return low < high
    ar = arb_arithmetic(RANGE_BITS)
    with ar.working():
        start, end = real_range(ar, scaling, base, rotary_dim)
        return bool(_negative(ar, ar.sub(start, end))[0, 0])


def kept_share(ar: Arithmetic[V], theta: V, base: float, rotary_dim: int, scaling: Scaling) -> V:
    """w [1, d/2]: the share of the unscaled frequency in yarn's and llama3's sums."""
    if scaling.in_rotations:
        rotations = ar.div(ar.mul(theta, ar.rational(scaling.length, 1)), ar.mul(ar.rational(2, 1), ar.pi()))
        above = ar.sub(rotations, number(ar, scaling.slow))
        return clamp(ar, ar.div(above, number(ar, scaling.fast - scaling.slow)))
    pairs = range(rotary_dim // 2)
    if scaling.truncate:
        low, high = integer_range(scaling, base, rotary_dim)
        return row(ar, [1 - min(max((i - low) / (high - low), Fraction(0)), Fraction(1)) for i in pairs])
    start, end = real_range(ar, scaling, base, rotary_dim)
    ramp = ar.div(ar.sub(row(ar, [Fraction(i) for i in pairs]), start), ar.sub(end, start))
    return ar.sub(ar.rational(1, 1), clamp(ar, ramp))


def scaled(ar: Arithmetic[V], theta: V, base: float, rotary_dim: int, scaling: Scaling, length: int) -> V:
    """The frequencies [1, d/2] that the rule makes of theta; ``length`` is L'."""
    match scaling.kind:
        case "default":
            return theta
        case "linear":
            return ar.div(theta, number(ar, scaling.factor))
        case "dynamic":
            ratio = base_ratio(scaling, length)
            if ratio == 1:
                return theta
            exponents = row(ar, [Fraction(-2 * i, rotary_dim - 2) for i in range(rotary_dim // 2)])
            return ar.mul(theta, ar.exp(ar.mul(exponents, ar.log(number(ar, ratio)))))
        case "longrope":
            return ar.div(theta, row(ar, list(list_of(scaling, length))))
        case "yarn" | "llama3":
            share = kept_share(ar, theta, base, rotary_dim, scaling)
            slowed = ar.div(ar.mul(ar.sub(ar.rational(1, 1), share), theta), number(ar, scaling.factor))
            return ar.add(slowed, ar.mul(share, theta))
    raise AssertionError(scaling.kind)


def magnitude(ar: Arithmetic[V], scaling: Scaling) -> V | None:
    """What multiplies cos and sin, [1, 1]; None for nothing."""
    how = scaling.magnitude
    match how.rule:
        case "none":
            return None
        case "given":
            return number(ar, how.value)
        case "yarn":
            return ar.div(_tempered(ar, scaling.factor, how.numerator), _tempered(ar, scaling.factor, how.denominator))
        case "longrope":
            if scaling.factor <= 1:
                return ar.rational(1, 1)
            growth = ar.div(ar.log(number(ar, scaling.factor)), ar.log(ar.rational(scaling.length, 1)))
            return ar.sqrt(ar.add(ar.rational(1, 1), growth))
    raise AssertionError(how.rule)


def softmax_factor(ar: Arithmetic[V], scaling: Scaling) -> V | None:
    """What DeepSeek's attention multiplies its softmax scale by, [1, 1]; None for nothing."""
    if scaling.factor <= 1 or scaling.all_dim == 0:
        return None
    root = _tempered(ar, scaling.factor, scaling.all_dim)
    return ar.mul(root, root)


def _tempered(ar: Arithmetic[V], factor: Fraction, m: Fraction) -> V:
    """1 + m ln(s)/10."""
    one = ar.rational(1, 1)
    if factor <= 1 or m == 0:
        return one
    return ar.add(ar.mul(number(ar, m / 10), ar.log(number(ar, factor))), one)


def axes(scaling: Scaling, pairs: int) -> NDArray[np.int64]:
    """[d/2]: which of the three positions turns each pair; zeros without sections."""
    place = np.arange(pairs)
    if scaling.sections is None:
        return np.zeros(pairs, dtype=np.int64)
    t, h, w = scaling.sections
    if not scaling.interleaved:
        return np.asarray((place >= t).astype(np.int64) + (place >= t + h))
    axis = place % 3
    return np.asarray(np.where((axis > 0) & (place < 3 * np.array([0, h, w])[axis]), axis, 0))
