"""`ball`: proven enclosures of whole matrices at BLAS speed.

A ball matrix is a float64 midpoint with two radii that broadcast against it: the exact entry x satisfies
``|x - mid| <= rad + rel * |mid|``. Radii are usually one number a row, so a large matrix costs hardly more than its
plain evaluation: the radius of a dot product comes from the norms of the two vectors (Cauchy-Schwarz, or Hoelder's
1-inf pair where that is smaller), not from a second matrix product. Leading axes are heads that are evaluated at once.

What is assumed, and where it is tested:

- float64 +, -, *, / and sqrt round to nearest (IEEE 754); a BLAS product is any order of summation, fused or not,
  without Strassen: |error| <= gamma_n sum |a||b| (Higham, Accuracy and Stability, section 3.1).
- numpy's float64 exp, log and tanh err by at most ``EXP_REL``, ``LOG_REL``, ``TANH_REL``: four times the worst error
  that `meta_tests` measures against arb on the machine that runs it, and at least 8 units of 2^-53.
- every radius is itself computed in float64 from non-negative numbers with fewer than 500 roundings, which ``UP``
  covers; sums over n entries are inflated by their own count; ``TINY`` covers every underflow of a result.
- subnormal operands are read as they are: `working` refuses a thread that flushes them to zero.

A midpoint that overflowed has an infinite or nan radius and is never decided here. docs/enclosures.md has the proofs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import flint
import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.scalar import Objects, ScalarArithmetic
from oracle.formats import Float64Array

Radius = float | Float64Array
"""One number for all entries, or an array that broadcasts to them."""

U = 2.0**-53
UP = 1.0 + 2.0**-44
TINY = 2.0**-1000
SMALLEST, ONE = 5e-324, 1.0
# Numbers whose squares are summed as they are.
LEAST_PLAIN, MOST_PLAIN = 2.0**-300, 2.0**299
EXP_REL = 2.0**-50
LOG_REL = 2.0**-50
TANH_REL = 2.0**-50
# Below this exp(x) is smaller than 2^-1022 and counts as zero with absolute error TINY.
EXP_FLOOR = -708.0
# Positions are split into digits of this base for tables of cos and sin.
ANGLE_RADIX = 256


@dataclass(frozen=True, slots=True, eq=False)
class Ball:
    """Midpoints ``[..., rows, columns]`` and radii that broadcast to them: absolute ``rad``, relative ``rel``."""

    mid: Float64Array
    rad: Radius = 0.0
    rel: Radius = 0.0

    def radius(self) -> Float64Array:
        """The full absolute radius, broadcast to the midpoints; inf where anything is not finite."""
        with np.errstate(all="ignore"):
            if _zero(self.rel):
                total = np.broadcast_to(self.rad * UP, self.mid.shape)
            else:
                total = np.abs(self.mid)
                total *= self.rel
                total += self.rad
                total *= UP
                # An entry without any radius (a column that was only copied) stays exact.
                total += TINY * (np.asarray(self.rel) > 0)
            if np.isfinite(self.mid.sum()) and np.isfinite(total.sum()):
                return total
        bad = ~np.isfinite(self.mid) | np.isnan(total)
        return np.where(bad, np.inf, total) if bad.any() else total


_NOTHING = np.zeros(())


def _zero(r: Radius) -> bool:
    return isinstance(r, float) and r == 0.0


def _gamma(n: int) -> float:
    return (n + 2) * U / (1 - (n + 2) * U) * UP


# einsum's subscripts and the axis put back, for norms along -1 and -2.
_SQUARES = {
    -1: ("...ij,...ij->...i", (..., None)),
    -2: ("...ij,...ij->...j", (..., None, slice(None))),
}


def _norm2(x: Float64Array, axis: int) -> Float64Array:
    """Upper bound of the Euclidean norms along ``axis`` (-1 or -2), keepdims; safe from overflow and underflow."""
    n = x.shape[axis]
    subscripts, kept = _SQUARES[axis]
    top = np.abs(x).max(axis=(-2, -1), keepdims=True, initial=0.0)
    if top.min(initial=1.0) >= LEAST_PLAIN and top.max(initial=1.0) < MOST_PLAIN:
        norms: Float64Array = np.sqrt(np.einsum(subscripts, x, x)[kept])
        norms *= 1 + (n + 8) * 2 * U
        norms += 2.0**-510 * n
        return norms
    scale = np.where(top > 0, np.ldexp(1.0, np.clip(np.frexp(top)[1], -1000, 1000)), 1.0)
    scale = np.where((scale > 2.0**-300) & (scale < 2.0**300), 1.0, scale)
    y = x / scale
    # Scaling by a power of two is exact but for entries far below the largest, and squares below 2^-1022 may be lost:
    # together they hide at most 2^-511 scale for each entry. Rounding a subnormal norm takes away at most 2^-1075.
    lost = np.where(top > 0, np.maximum(scale * 2.0**-510, 2.0**-1073), TINY)
    norms = np.sqrt(np.einsum(subscripts, y, y)[kept]) * (scale * (1 + (n + 8) * 2 * U)) + lost * n
    return np.where(np.isfinite(top), norms, np.inf)


def _norm1(x: Float64Array, axis: int) -> Float64Array:
    n = x.shape[axis]
    return np.asarray(np.abs(x).sum(axis=axis, keepdims=True) * (1 + (n + 2) * 2 * U))


def _norm_inf(x: Float64Array, axis: int) -> Float64Array:
    return np.asarray(np.maximum(x.max(axis=axis, keepdims=True), -x.min(axis=axis, keepdims=True)))


def _row_absolute(a: Ball, *, within: float = 2.0**30) -> Radius:
    """The radius of ``a`` without a relative part: one number a row where the row's range allows that."""
    if _zero(a.rel):
        return a.rad
    if a.mid.shape[-1] > 1:
        top = _norm_inf(a.mid, -1)
        calm = (top < within).all(axis=-2, keepdims=True)
        if calm.any():
            of_rows = (a.rad + _largest(a.rel, -1) * top) * UP + TINY
            return of_rows if calm.all() else np.where(calm, of_rows, (a.rad + a.rel * np.abs(a.mid)) * UP + TINY)
    return (a.rad + a.rel * np.abs(a.mid)) * UP + TINY


def _as_relative(b: Ball) -> Radius:
    """Everything as a relative radius (for small operands); inf where the midpoint is zero."""
    if _zero(b.rad):
        return b.rel
    return (b.rel + b.rad / np.abs(b.mid)) * UP


@dataclass(frozen=True, slots=True)
class BallArithmetic:
    """`oracle.arithmetic.base.Arithmetic` on balls. Angles are computed in arb at 160 bits."""

    name: str = "ball"
    stacks: bool = True

    @property
    def angles(self) -> ScalarArithmetic[flint.arb]:
        return arb_arithmetic(160)

    def working(self) -> AbstractContextManager[object]:
        """RuntimeError if this thread flushes float64 subnormals, as some kernels leave it behind."""
        if SMALLEST * ONE == 0.0:
            raise RuntimeError(
                "float64 subnormals are flushed to zero in this thread, so that no radius can be trusted"
            )
        return np.errstate(all="ignore")

    def const(self, x: ArrayLike) -> Ball:
        return Ball(np.atleast_2d(np.asarray(x)).astype(np.float64, copy=False))

    def rational(self, numerator: int, denominator: int) -> Ball:
        value = np.array([[numerator / denominator]])
        exact = denominator == 1 and abs(numerator) <= 2**53
        return Ball(value, 0.0, 0.0 if exact else 2 * U)

    def add(self, a: Ball, b: Ball) -> Ball:
        return Ball(a.mid + b.mid, (_row_absolute(a) + _row_absolute(b)) * UP, U)

    def sub(self, a: Ball, b: Ball) -> Ball:
        return self.add(a, Ball(-b.mid, b.rad, b.rel))

    def mul(self, a: Ball, b: Ball) -> Ball:
        if b.mid.size > a.mid.size:
            a, b = b, a
        mid = a.mid * b.mid
        if not b.mid.all() or (np.shape(b.rad) == b.mid.shape and b.mid.shape[-1] > 1):
            # A zero factor has no relative radius, and one near zero (a cosine) would spread a large one to its row:
            # both radii become absolute.
            ra, rb = a.radius(), b.radius()
            return Ball(mid, (np.abs(a.mid) * rb + np.abs(b.mid) * ra + ra * rb) * UP + TINY, U)
        rel_b = _as_relative(b)
        rel = ((1 + a.rel) * (1 + rel_b) * (1 + U) - 1) * UP + 4 * U
        # Where a product underflows, its relative radius has nothing left to multiply.
        lost = TINY * (1 + rel)
        rad = lost if _zero(a.rad) else (a.rad * np.abs(b.mid) * (1 + rel_b)) * UP + lost
        return Ball(mid, rad, rel)

    def div(self, a: Ball, b: Ball) -> Ball:
        # A divisor that overflowed is not known at all, although 1 / inf looks like a small number.
        rel_b = np.where(np.isfinite(b.mid), _as_relative(b), np.inf)
        inverse = Ball(
            1.0 / b.mid, 0.0, np.where(rel_b < 0.5, rel_b / (1 - np.minimum(rel_b, 0.5)), np.inf) * UP + 2 * U
        )
        out = self.mul(Ball(a.mid, a.rad, a.rel), inverse)
        return Ball(a.mid / b.mid, out.rad, out.rel + 4 * U)

    def matmul(self, a: Ball, b: Ball, stage: str) -> Ball:
        k = a.mid.shape[-1]
        mid = a.mid @ b.mid
        a2, b2 = _norm2(a.mid, -1), _norm2(b.mid, -2)
        gamma = _gamma(k)
        if _exact(a) and _exact(b) and mid.shape[-2] * mid.shape[-1] > 2**16 and mid.shape[-1] >= k:
            # A wide product of exact inputs (scores): one radius a row, from the longest column.
            # gamma comes last: a product that underflows then loses less than TINY, one that overflows is undecided.
            return Ball(mid, a2 * b2.max(axis=-1, keepdims=True) * gamma * UP + k * TINY, 0.0)
        size = a2 * b2
        if k > 64:
            # Peaked rows: ||p||_1 ||v||_inf is up to sqrt(k) smaller than the Euclidean product.
            size = np.minimum(size, _norm1(a.mid, -1) * _norm_inf(b.mid, -2))
        rel = _largest(a.rel, -1)
        rel_b = _largest(b.rel, -2)
        rad = (size + TINY) * ((1 + rel) * (1 + rel_b) * (1 + gamma) - 1 + 4 * U)
        # The absolute parts meet the other operand's norms.
        a_rad = _norm2(np.broadcast_to(a.rad, a.mid.shape), -1) if not _zero(a.rad) else 0.0
        b_rad = _norm2(np.broadcast_to(b.rad, b.mid.shape), -2) if not _zero(b.rad) else 0.0
        cross = a_rad * (b2 * (1 + rel_b)) + b_rad * (a2 * (1 + rel)) + a_rad * b_rad
        return Ball(mid, (rad + cross) * UP + k * TINY, 0.0)

    def transpose(self, a: Ball) -> Ball:
        return Ball(a.mid.swapaxes(-1, -2), _turn(a.rad), _turn(a.rel))

    def exp(self, a: Ball) -> Ball:
        mid = np.exp(a.mid)
        low = a.mid.min(axis=-1, keepdims=True, initial=0.0)
        if _zero(a.rel):
            shift: Radius = a.rad
        else:
            # Exponents below the floor count as zero with TINY, so their relative radius need not reach the row.
            narrow = float(np.max(a.rel)) < 2.0**-10
            deep = np.maximum(low, EXP_FLOOR - 40.0) if narrow else low
            top = np.maximum(a.mid.max(axis=-1, keepdims=True, initial=0.0), -deep)
            shift = (a.rad + _largest(a.rel, -1) * top) * UP
        # exp(-inf) looks like an exact zero, but a midpoint that overflowed to -inf says nothing of its exponent.
        # Nor does a row with a nan, behind which the minimum does not show it.
        shift = np.where(np.isfinite(low), shift, np.inf)
        rel = np.expm1(shift) * (1 + EXP_REL) * UP + EXP_REL
        # An exponent below the floor: at most exp(floor) exp(shift) < TINY (1 + rel) in truth and at most exp(floor)
        # here. One below floor - 40 may hide a relative part up to 2^-10 |a| that `shift` leaves out: its true
        # exponent is then still below the floor + rad.
        return Ball(mid, TINY * (1 + rel), rel)

    def log(self, a: Ball) -> Ball:
        rel = _as_relative(a)
        width = np.where(rel < 0.5, -np.log1p(-np.minimum(rel, 0.5)), np.inf)
        return Ball(np.log(a.mid), width * UP + TINY, LOG_REL)

    def tanh(self, a: Ball) -> Ball:
        # tanh(inf) looks like 1.
        rad = np.where(np.isfinite(a.mid), _row_absolute(a) * UP + TINY, np.inf)
        return Ball(np.tanh(a.mid), rad, TANH_REL)

    def sqrt(self, a: Ball) -> Ball:
        rel = _as_relative(a)
        return Ball(np.sqrt(a.mid), 0.0, np.where(rel < 0.5, rel, np.inf) * UP + 2 * U)

    def row_max(self, a: Ball, visible: NDArray[np.bool_]) -> Ball:
        if visible.all():
            top = a.mid.max(axis=-1, keepdims=True) if a.mid.shape[-1] else np.zeros((*a.mid.shape[:-1], 1))
        else:
            top = np.max(a.mid, axis=-1, keepdims=True, where=np.broadcast_to(visible, a.mid.shape), initial=-np.inf)
        return Ball(np.where(np.isneginf(top), 0.0, top))

    def maximum(self, a: Ball, b: Ball) -> Ball:
        return Ball(np.maximum(a.mid, b.mid))

    def row_sum(self, a: Ball, stage: str) -> Ball:
        n = a.mid.shape[-1]
        mid = a.mid.sum(axis=-1, keepdims=True)
        gamma = _gamma(n)
        if float(a.mid.min(initial=0.0)) >= 0:
            rel = _largest(a.rel, -1)
            rel = (((1 + rel) * (1 + gamma)) / (1 - gamma) - 1) * UP + 4 * U
            return Ball(mid, _row_total(a.rad, n) * UP + TINY, rel)
        size = _norm1(a.mid, -1)
        rel = _largest(a.rel, -1)
        return Ball(mid, (_row_total(a.rad, n) + size * ((1 + rel) * (1 + gamma) - 1 + 4 * U)) * UP + TINY, 0.0)

    def where(self, visible: NDArray[np.bool_], a: Ball) -> Ball:
        if visible.all():
            return a
        return Ball(np.where(visible, a.mid, 0.0), a.rad, a.rel)

    def select(self, condition: NDArray[np.bool_], a: Ball, b: Ball) -> Ball:
        def choose(x: Radius, y: Radius) -> Radius:
            return 0.0 if _zero(x) and _zero(y) else np.where(condition, x, y)

        return Ball(np.where(condition, a.mid, b.mid), choose(a.rad, b.rad), choose(a.rel, b.rel))

    def cos_sin(self, positions: NDArray[np.int64], frequencies: Objects) -> tuple[Ball, Ball]:
        whole, back = np.unique(np.asarray(positions, dtype=np.int64), return_inverse=True)
        cos, sin = self._turn(whole, frequencies)
        if np.array_equal(back, np.arange(len(whole))):
            return cos, sin
        return _pick(cos, back), _pick(sin, back)

    def _turn(self, whole: NDArray[np.int64], frequencies: Objects) -> tuple[Ball, Ball]:
        exact = self.angles
        if len(whole) <= 2 * ANGLE_RADIX:
            with exact.working():
                pair = exact.cos_sin(whole, frequencies)
                split = [exact.to_enclosure(part) for part in pair]
            cos, sin = (Ball(hi, np.asarray(np.abs(lo) + rad) * UP, 0.0) for hi, lo, rad in split)
            return cos, sin
        # Angle addition over the position's digits: 4096 positions cost 16 + 256 evaluations in arb, not 4096.
        high, low = np.divmod(whole, ANGLE_RADIX)
        far, far_at = np.unique(high, return_inverse=True)
        near, near_at = np.unique(low, return_inverse=True)
        with exact.working():
            faster = exact.mul(frequencies, exact.rational(ANGLE_RADIX, 1))
        c1, s1 = (_pick(part, far_at) for part in self._turn(far, faster))
        c2, s2 = (_pick(part, near_at) for part in self._turn(near, frequencies))
        cos = self.sub(self.mul(c1, c2), self.mul(s1, s2))
        sin = self.add(self.mul(s1, c2), self.mul(c1, s2))
        return Ball(cos.mid, cos.radius(), 0.0), Ball(sin.mid, sin.radius(), 0.0)

    def power(self, base: float, numerators: NDArray[np.int64], denominator: int) -> Objects:
        raise TypeError("frequencies belong to `angles`, where they are exact enough for positions to 2^24")

    def pi(self) -> Ball:
        return Ball(np.array([[np.pi]]), 0.0, 2 * U)

    def columns(self, a: Ball, start: int, stop: int, step: int = 1) -> Ball:
        part = (slice(None), slice(start, stop, step))
        return Ball(a.mid[..., *part], _cut(a.rad, a.mid.shape, part), _cut(a.rel, a.mid.shape, part))

    def rows(self, a: Ball, start: int, stop: int) -> Ball:
        part = (slice(start, stop), slice(None))
        return Ball(a.mid[..., *part], _cut(a.rad, a.mid.shape, part), _cut(a.rel, a.mid.shape, part))

    def hstack(self, parts: list[Ball]) -> Ball:
        return Ball(
            np.concatenate([p.mid for p in parts], axis=-1),
            np.concatenate([np.broadcast_to(p.rad, p.mid.shape) for p in parts], axis=-1),
            np.concatenate([np.broadcast_to(p.rel, p.mid.shape) for p in parts], axis=-1),
        )

    def round(self, a: Ball, stage: str) -> Ball:
        return a

    def to_enclosure(self, a: Ball) -> tuple[Float64Array, Float64Array, Float64Array]:
        return a.mid, np.broadcast_to(_NOTHING, a.mid.shape), a.radius()


def _pick(a: Ball, index: NDArray[np.intp]) -> Ball:
    """Rows by number, of a ball with a full absolute radius."""
    return Ball(a.mid[index], np.asarray(a.rad)[index], 0.0)


def _largest(r: Radius, axis: int) -> Radius:
    """The largest radius along ``axis``, keepdims."""
    if isinstance(r, float) or r.ndim < 2 or r.shape[axis] == 1:
        return r
    return np.asarray(r.max(axis=axis, keepdims=True))


def _exact(a: Ball) -> bool:
    return _zero(a.rad) and _zero(a.rel)


def _row_total(rad: Radius, n: int) -> Radius:
    if np.ndim(rad) >= 2 and np.shape(rad)[-1] == n:
        return np.asarray(np.sum(rad, axis=-1, keepdims=True) * (1 + (n + 2) * 2 * U))
    return n * np.asarray(rad)


def _turn(r: Radius) -> Radius:
    return r if isinstance(r, float) or r.ndim < 2 else r.swapaxes(-1, -2)


def _cut(r: Radius, shape: tuple[int, ...], part: tuple[slice, slice]) -> Radius:
    if isinstance(r, float) or r.ndim < 2:
        return r
    rows, columns = r.shape[-2:]
    return r[..., part[0] if rows == shape[-2] else slice(None), part[1] if columns == shape[-1] else slice(None)]
