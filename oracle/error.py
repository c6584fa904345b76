"""How wrong an observed output is: error intervals per element, and the pooled metrics of a record.

`measure` is total: it gives an answer for every bit pattern of the output format. The exact value is a
real number within an enclosure, so an error is an interval (midpoint, radius) too. The rules for special
values:

==============================  ==============================================================================
observed                        error
==============================  ==============================================================================
finite                          distance to the enclosure's midpoint, radius of the enclosure
+0 and -0                       the same: a real zero has no sign
subnormal                       as any finite value; its ULP is the subnormal spacing
inf, -inf                       infinite, also where the exact value rounds to it: `exact` tells the two apart
NaN of any sign and payload     infinite; the signed error is nan, for it lies on neither side
anything, radius infinite       undecided: signed, absolute and ulp are nan, so that no comparison holds
==============================  ==============================================================================

ULP figures are distances in units of the spacing of the output format at the exact value (Muller et al.,
Handbook of Floating-Point Arithmetic, 2nd ed., section 2.3.2, Goldberg's definition extended to reals);
above the largest finite number the top binade's spacing counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.enclosure import Enclosure
from oracle.formats import Float64Array, Format, StoredArray, format_of

Mask = NDArray[np.bool_]

# Covers the few roundings of each figure below, all of them relative 2^-53.
_UP = 1.0 + 2.0**-49


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Errors of one output, arrays of the enclosure's shape.

    signed: observed minus exact; the exact one lies in signed +- radius. absolute: its magnitude. finite: the observed
    value is finite. decided: the enclosure's radius is finite. counted: elements that take part in metrics (not empty
    rows, exempt elements and the like).
    """

    observed: StoredArray
    enclosure: Enclosure
    fmt: Format
    signed: Float64Array
    radius: Float64Array
    absolute: Float64Array
    finite: Mask
    decided: Mask
    counted: Mask

    @property
    def ulp(self) -> Float64Array:
        """``absolute`` in units of the format's spacing at the exact value; worked out when asked for."""
        with np.errstate(all="ignore"):
            return _in_ulp(self.absolute, self.enclosure, self.fmt)

    @property
    def ulp_radius(self) -> Float64Array:
        """The radius of `ulp`."""
        return _ulp_radius(self.absolute, self.radius, self.enclosure, self.fmt)

    @property
    def exact(self) -> Mask:
        """Whether the observed value is proven to be the exact one rounded to nearest, ties to even."""
        with np.errstate(all="ignore"):
            return self.decided & _is_rounded(self.observed, self.enclosure, self.fmt)


def measure(observed: StoredArray, enclosure: Enclosure, fmt: Format, *, counted: Mask | None = None) -> Errors:
    """Errors of ``observed`` (storage dtype of ``fmt``) against ``enclosure`` (the same shape).

    ValueError if shape or dtype does not fit. ``counted`` (default: all) broadcasts to the shape.
    """
    if observed.shape != enclosure.hi.shape:
        raise ValueError(f"observed has shape {list(observed.shape)}, its enclosure {list(enclosure.hi.shape)}")
    if observed.dtype != np.dtype(fmt.dtype):
        raise ValueError(f"observed has dtype {observed.dtype}, but {fmt.name} is stored as {np.dtype(fmt.dtype)}")
    hi, lo, rad = enclosure.hi, enclosure.lo, enclosure.rad
    with np.errstate(all="ignore"):
        # Widening a signalling NaN raises the invalid flag, hence inside.
        y = observed.astype(np.float64)
        finite, decided = np.isfinite(y), np.isfinite(hi) & np.isfinite(lo) & np.isfinite(rad)
        gap, rest, slack = _difference(y, hi, lo)
        slack = slack + np.abs(rest)
        # An infinite observation keeps the sign of its side, a NaN stays nan.
        signed = np.where(decided, np.where(finite, gap, y), np.nan)
        radius = np.where(decided, np.where(slack == 0, rad, (rad + slack) * _UP), np.inf)
        absolute = np.where(decided, np.where(finite, np.abs(gap), np.inf), np.nan)
    chosen = (
        np.ones(observed.shape, dtype=bool) if counted is None else np.array(np.broadcast_to(counted, observed.shape))
    )
    return Errors(observed, enclosure, fmt, signed, radius, absolute, finite, decided, chosen)


def _two_sum(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    # Knuth's exact transformation: a + b = total + rest (Handbook, algorithm 4.4); rest is nan if something
    # overflows.
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _difference(y: Float64Array, hi: Float64Array, lo: Float64Array) -> tuple[Float64Array, Float64Array, Float64Array]:
    """(d, rest, slack): y - (hi + lo) lies in d + rest +- slack; rest is at most some 2^-53 of y or hi."""
    first, rest = _two_sum(y, -hi)
    total, low_rest = _two_sum(first, -lo)
    both = rest + low_rest
    slack = np.where((rest == 0) | (low_rest == 0), 0.0, np.abs(both) * 2.0**-52)
    # Out of fp64's range altogether: infinite, and so beyond every bound, without doubt.
    lost = ~np.isfinite(both)
    return (
        total,
        np.where(lost, 0.0, both),
        np.where(lost & np.isfinite(total), np.abs(total) * 2.0**-50, np.where(lost, 0.0, slack)),
    )


def _in_ulp(absolute: Float64Array, e: Enclosure, fmt: Format) -> Float64Array:
    magnitude = np.abs(e.hi)
    # Just below a power of two the spacing is half of that at hi itself.
    inward = e.lo * np.sign(e.hi) < 0
    return np.asarray(absolute / fmt.ulp(np.where(inward, np.nextafter(magnitude, 0.0), magnitude)))


def _ulp_radius(absolute: Float64Array, radius: Float64Array, e: Enclosure, fmt: Format) -> Float64Array:
    with np.errstate(all="ignore"):
        ulp, magnitude = _in_ulp(absolute, e, fmt), np.abs(e.hi)
        reach = (np.abs(e.lo) + e.rad) * _UP
        low = np.where(reach == 0, magnitude, np.maximum(np.nextafter(magnitude - reach, -np.inf), 0.0))
        high = np.where(reach == 0, magnitude, np.nextafter(magnitude + reach, np.inf))
        upper = (absolute + radius) / fmt.ulp(low)
        lower = np.maximum(absolute - radius, 0.0) / fmt.ulp(high)
        spread = np.maximum(np.maximum(upper - ulp, ulp - lower), 0.0)
        spread = np.where(reach == 0, radius / fmt.ulp(magnitude), spread) * _UP
        # Infinite errors are infinite at both ends.
        return np.where(np.isinf(absolute), 0.0, np.where(np.isnan(absolute), np.inf, spread))


def _is_rounded(observed: StoredArray, e: Enclosure, fmt: Format) -> Mask:
    """Where every real number of the enclosure rounds to ``observed``."""
    y = observed.astype(np.float64)
    infinite = np.isinf(y)
    some = bool(infinite.any())
    # The distance of the exact value from y, or from the border beyond which infinity is the rounded value.
    base = np.where(infinite, np.copysign(fmt.overflow_threshold, y), y) if some else y
    gap, rest, slack = _difference(base, e.hi, e.lo)
    away = np.where(np.signbit(base), 1.0, -1.0)
    magnitude = np.abs(np.where(infinite, 0.0, y) if some else y)
    above = fmt.ulp(magnitude)
    below = above * np.where(fmt.is_power_above_min(magnitude), 0.5, 1.0)
    # Twice the distance against the whole gap: half of the smallest fp64 gap is no fp64 number.
    twice, small, reach = 2 * away * gap, 2 * away * rest, 2 * (e.rad + slack)
    over, under = _sign(twice - above, small, reach), _sign(twice + below, small, -reach)
    # A tie goes to the even. The storage dtype may have digits that the format lacks (tf32): then y must be a member.
    unused = format_of(observed).precision - fmt.precision
    even = _is_even(observed, unused)
    inside = ((over < 0) | (even & (over == 0))) & ((under > 0) | (even & (under == 0)))
    if unused:
        inside &= fmt.round(y) == y
    if not some:
        return np.asarray(inside)
    return np.where(infinite, _sign(away * gap, away * rest, -(e.rad + slack)) >= 0, inside)


def _sign(large: Float64Array, small: Float64Array, reach: Float64Array) -> Float64Array:
    """A number with the sign of large + small + reach; where reach is not 0, pushed its way by all rounding."""
    plain = large + small
    pushed = plain + reach
    spare = (np.abs(large) + np.abs(small) + np.abs(reach)) * 2.0**-50 + 5e-324
    return np.where(reach == 0, plain, pushed + np.copysign(spare, reach))


def _is_even(observed: StoredArray, unused: int) -> Mask:
    bits = np.ascontiguousarray(observed).view(f"u{observed.dtype.itemsize}").reshape(observed.shape)
    return np.asarray((bits >> unused) & 1 == 0)


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst element: which part, its index there, and the values in hex."""

    part: int
    index: tuple[int, ...]
    observed: str
    exact: str
    exact_low: str
    radius: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """Pooled metrics of all counted and decided elements; None where a figure is undefined.

    n: elements compared. undecided: counted ones without a finite radius, in no other figure. nonfinite:
    observed inf or NaN that is not the rounded exact value. overflowed: inf that is, in no figure but this
    and `exact`. ulp_max (with its radius), ulp_p999 (a value that occurs, not interpolated), ulp_mean.
    scaled_ulp: largest error / (u denominator). normwise: ||error||_2 / ||exact||_2. rms: of the error,
    absolute. bound_ratio: largest error / bound. bias: mean signed error / u, over the finite. z: mean signed
    error / its standard error, as if elements were independent.
    """

    n: int
    undecided: int
    nonfinite: int
    overflowed: int
    exact: int
    ulp_max: float | None
    ulp_max_radius: float | None
    ulp_p999: float | None
    ulp_mean: float | None
    scaled_ulp: float | None
    normwise: float | None
    rms: float | None
    bound_ratio: float | None
    bias: float | None
    z: float | None
    worst: Worst | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: numbers, None, hex strings in ``worst``; an infinite figure is "inf" or "-inf"."""
        figures = {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__ if name != "worst"}
        w = self.worst
        worst = None if w is None else {name: getattr(w, name) for name in w.__dataclass_fields__}
        if worst is not None:
            worst["index"] = list(worst["index"])
        return {**figures, "worst": worst}


def _plain(x: object) -> object:
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


Part = tuple[Errors, Float64Array | None, Float64Array | None]
"""(errors, bound or None, denominators of the scaled ULP such as sum p|v| or None), arrays of one shape."""


def summarise(parts: Sequence[Part]) -> Metrics:
    """Metrics of several blocks pooled. ValueError if they are of different formats."""
    names = {errors.fmt.name for errors, _, _ in parts}
    if len(names) > 1:
        raise ValueError(f"cannot pool errors of different formats: {', '.join(sorted(names))}")
    with np.errstate(all="ignore"):
        return _summarise(parts)


def _summarise(parts: Sequence[Part]) -> Metrics:
    u = parts[0][0].fmt.unit_roundoff if parts else 1.0
    errors, rounded = [e for e, _, _ in parts], [e.exact for e, _, _ in parts]
    overflow = [e.counted & right & ~e.finite for e, right in zip(errors, rounded, strict=True)]
    used = [e.counted & e.decided & ~over for e, over in zip(errors, overflow, strict=True)]
    whole = [bool(use.all()) for use in used]

    def pool(arrays: Sequence[Any]) -> Any:
        shaped = (
            a if a.shape == use.shape else np.broadcast_to(a, use.shape) for a, use in zip(arrays, used, strict=True)
        )
        chosen = [a.reshape(-1) if every else a[use] for a, use, every in zip(shaped, used, whole, strict=True)]
        return chosen[0] if len(chosen) == 1 else np.concatenate(chosen) if chosen else np.empty(0)

    absolute, ulp = pool([e.absolute for e in errors]), pool([e.ulp for e in errors])
    finite, signed = pool([e.finite for e in errors]).astype(bool), pool([e.signed for e in errors])
    signed = signed if finite.all() else signed[finite]
    ratio = pool([_ratio(e.absolute, bound) for e, bound, _ in parts])
    sizes = [None if d is None else np.asarray(d) * u for _, _, d in parts]
    sized = any(d is not None for d in sizes)
    scaled = pool([_ratio(e.absolute, d) for e, d in zip(errors, sizes, strict=True)]) if sized else np.empty(0)
    n = int(absolute.size)
    # The worst element: by error / bound where that is defined, then by ULP.
    key = np.where(np.isnan(ratio), -1.0, ratio)
    candidates = np.flatnonzero(key == np.max(key, initial=-1.0))
    worst = int(candidates[np.argmax(ulp[candidates])]) if n else None
    mean, z = _mean_and_z(signed)
    exact = pool([np.abs(e.enclosure.hi) for e in errors])
    error_norm, exact_norm = _norm(absolute), _norm(exact)
    over = int(sum(np.count_nonzero(o) for o in overflow))
    # The value at or above this share of all; one that occurs.
    high = math.ceil((n - 1) * 0.999)
    return Metrics(
        n=n,
        undecided=int(sum(np.count_nonzero(e.counted & ~e.decided) for e in errors)),
        nonfinite=int(n - np.count_nonzero(finite)),
        overflowed=over,
        exact=int(np.count_nonzero(pool(rounded))) + over,
        ulp_max=float(ulp.max()) if n else None,
        ulp_max_radius=_radius_at(errors, used, int(np.argmax(ulp))) if n else None,
        ulp_p999=float(np.partition(ulp, high)[high]) if n else None,
        ulp_mean=float(np.mean(ulp)) if n else None,
        scaled_ulp=_largest(scaled),
        normwise=(error_norm / exact_norm if exact_norm else (0.0 if error_norm == 0 else math.inf)) if n else None,
        rms=error_norm / math.sqrt(n) if n else None,
        bound_ratio=_largest(ratio),
        bias=None if mean is None else mean / u,
        z=z,
        worst=None if worst is None else _worst(errors, used, worst),
    )


def _ratio(error: Float64Array, size: Any) -> Float64Array:
    """error / size; 0 / 0 is 0; nan where nothing is promised (no size, inf or nan)."""
    if size is None:
        return np.full(error.shape, np.nan)
    return np.asarray(np.where(np.isfinite(size), np.where(error == 0, 0.0, error / size), np.nan))


def _largest(x: Float64Array) -> float | None:
    known = x[~np.isnan(x)]
    return float(known.max()) if known.size else None


def _norm(x: Float64Array) -> float:
    """Euclidean norm without overflow; inf if an entry is."""
    top = float(np.max(x, initial=0.0))
    return top * float(np.sqrt(np.sum((x / top) ** 2))) if 0 < top < math.inf else top


def _mean_and_z(x: Float64Array) -> tuple[float | None, float | None]:
    top = float(np.max(np.abs(x), initial=0.0))
    if x.size == 0 or not math.isfinite(top):
        return None, None
    y = x / top if top > 0 else x
    mean = float(np.mean(y))
    # With one element, or none that errs, there is no spread to compare the mean with.
    if x.size < 2 or top == 0:
        return mean * top, None
    deviation = float(np.std(y, ddof=1))
    return mean * top, mean * math.sqrt(x.size) / deviation if deviation > 0 else math.copysign(math.inf, mean)


def _place(used: Sequence[Mask], position: int) -> tuple[int, tuple[int, ...]]:
    """(part, index there) of an element by its position among all that are used."""
    for number, use in enumerate(used):
        count = int(np.count_nonzero(use))
        if position < count:
            flat = int(np.flatnonzero(use)[position])
            return number, tuple(int(i) for i in np.unravel_index(flat, use.shape))
        position -= count
    raise IndexError(position)


def _worst(errors: Sequence[Errors], used: Sequence[Mask], position: int) -> Worst:
    number, at = _place(used, position)
    e = errors[number]
    exact = (float(part[at]).hex() for part in e.enclosure.parts())
    return Worst(number, at, float(e.observed[at]).hex(), *exact)


def _radius_at(errors: Sequence[Errors], used: Sequence[Mask], position: int) -> float:
    number, at = _place(used, position)
    e, one = errors[number], tuple(slice(i, i + 1) for i in at)
    return float(_ulp_radius(e.absolute[one], e.radius[one], e.enclosure.rows(one), e.fmt).reshape(-1)[0])
