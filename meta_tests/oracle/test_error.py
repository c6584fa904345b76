"""Error intervals for every bit pattern, against Fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from meta_tests.oracle.plain_enclosure import enclosure
from oracle.enclosure import Enclosure
from oracle.error import measure
from oracle.formats import BF16, FORMATS, FP16, FP32, FP64, TF32

pytestmark = pytest.mark.filterwarnings("error")
SHORT = pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda f: f.name)
EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def every_pattern(fmt):
    return np.arange(2**16, dtype=np.uint16).view(fmt.dtype)


def wide(stored):
    with np.errstate(invalid="ignore"):
        return stored.astype(np.float64)


def points(fmt):
    """Exact values that meet every regime of a format."""
    tiny, top = fmt.smallest_subnormal, fmt.max_finite
    some = [
        0.0,
        tiny,
        tiny / 2,
        tiny / 4,
        3.5 * tiny,
        fmt.smallest_normal,
        1.0,
        1 / 3,
        1 + fmt.unit_roundoff,
        2.0,
    ]
    some += [top, fmt.overflow_threshold, 4 * top, 1e-300, 5e-324]
    return [s * x for x in some for s in (1.0, -1.0) if math.isfinite(x)]


def finite_ladder(fmt):
    values = wide(every_pattern(fmt))
    return np.unique(values[np.isfinite(values)])


@SHORT
@pytest.mark.parametrize("rad", [0.0, 1e-3, 1e9])
def test_every_pattern_has_an_error(fmt, rad):
    stored = every_pattern(fmt)
    y = wide(stored)
    for exact in points(fmt):
        e = measure(stored, enclosure(exact, 0.0, rad, shape=stored.shape), fmt)
        assert np.array_equal(e.finite, np.isfinite(y))
        assert e.decided.all()
        assert not np.isnan(e.absolute).any()
        assert not np.isnan(e.ulp).any()
        assert not np.isnan(e.ulp_radius).any()
        assert np.isfinite(e.absolute[e.finite]).all()
        assert np.isfinite(e.ulp[e.finite]).all()
        assert np.isinf(e.absolute[~e.finite]).all()
        assert np.isinf(e.ulp[~e.finite]).all()
        assert np.array_equal(np.isnan(e.signed), np.isnan(y))
        assert np.array_equal(e.signed[np.isinf(y)], y[np.isinf(y)])
        assert (e.radius >= rad).all()
        assert np.isfinite(e.radius).all()
        # Zero where equal and nowhere else; both zeros are the number 0.
        assert np.array_equal(e.absolute == 0, y == exact)
        assert np.array_equal(e.ulp == 0, y == exact)


@SHORT
def test_every_pattern_mirrors(fmt):
    stored = every_pattern(fmt)
    mirrored = (stored.view(np.uint16) ^ np.uint16(0x8000)).view(fmt.dtype)
    for exact in points(fmt):
        a = measure(stored, enclosure(exact, exact * 2.0**-60, 1e-9, shape=stored.shape), fmt)
        b = measure(mirrored, enclosure(-exact, -exact * 2.0**-60, 1e-9, shape=stored.shape), fmt)
        assert np.array_equal(a.signed, -b.signed, equal_nan=True)
        for name in ("radius", "absolute", "ulp", "ulp_radius", "finite", "exact"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


@SHORT
def test_error_grows_with_the_distance(fmt):
    y = finite_ladder(fmt)
    for exact in points(fmt):
        e = measure(y.astype(fmt.dtype), enclosure(exact, shape=y.shape), fmt)
        assert (np.diff(e.signed) >= 0).all()
        right, left = y >= exact, y <= exact
        assert (np.diff(e.ulp[right]) >= 0).all()
        assert (np.diff(e.ulp[left]) <= 0).all()


@SHORT
def test_every_pattern_of_an_unbounded_enclosure_is_undecided(fmt):
    stored = every_pattern(fmt)
    for hi, lo, rad in [
        (1.0, 0.0, np.inf),
        (np.inf, 0.0, np.inf),
        (np.nan, 0.0, 0.0),
        (np.inf, 0.0, 0.0),
        (1.0, np.nan, 0.0),
        (1.0, 0.0, np.nan),
    ]:
        e = measure(stored, enclosure(hi, lo, rad, shape=stored.shape), fmt)
        assert not e.decided.any()
        assert not e.exact.any()
        assert np.isnan(e.absolute).all()
        assert np.isnan(e.signed).all()
        assert np.isnan(e.ulp).all()
        assert np.isinf(e.radius).all()
        assert np.isinf(e.ulp_radius).all()
        # Neither comparison of the three-way decision holds, whatever the bound.
        for bound in (0.0, 1.0, np.inf):
            assert not (e.absolute + e.radius <= bound).any()
            assert not (e.absolute - e.radius > bound).any()


def test_errors_hold_what_fractions_say():
    rng = np.random.default_rng(1)
    for fmt in FORMATS.values():
        n = 1500
        hi = np.ldexp(rng.uniform(-2, 2, n), rng.integers(max(fmt.emin - 5, -1000), min(fmt.emax, 1000), n).astype(int))
        lo = hi * rng.uniform(-1, 1, n) * 2.0**-53 * rng.choice([0, 1, 2.0**-20], n)
        rad = np.abs(hi) * rng.choice([0, 2.0**-60, 2.0**-30, 2.0**-12], n)
        # Observed: the neighbours of the exact value, and some that are far off.
        nearest = fmt.round(hi)
        nearest = np.where(np.isfinite(nearest), nearest, fmt.max_finite)
        pick = rng.integers(0, 5, n)
        beside = [nearest, fmt.next_up(nearest), fmt.next_down(nearest)]
        y = np.choose(pick, [*beside, -nearest, fmt.round(nearest * 1e-3)])
        y = np.where(np.isfinite(y), y, 0.0)
        e = measure(y.astype(fmt.dtype), Enclosure(hi, lo, rad), fmt)
        for i in range(n):
            middle = Fraction(float(hi[i])) + Fraction(float(lo[i]))
            r = Fraction(float(rad[i]))
            for exact in {middle, middle - r, middle + r}:
                true = Fraction(float(y[i])) - exact
                assert abs(true - Fraction(float(e.signed[i]))) <= Fraction(float(e.radius[i])), (fmt.name, i)
                spacing = Fraction(float(fmt.ulp(_down(abs(exact)))))
                off = abs(abs(true) / spacing - Fraction(float(e.ulp[i])))
                assert off <= Fraction(float(e.ulp_radius[i])) + Fraction(1, 10**12) * (1 + Fraction(float(e.ulp[i])))
        # And is not needlessly wide.
        assert (e.radius <= rad * (1 + 1e-10) + np.maximum(np.abs(hi), np.abs(y)) * 2.0**-52).all()
        near = (y / hi > 0.5) & (y / hi < 2)
        assert near.any()
        assert (e.radius <= rad * (1 + 1e-10) + np.abs(e.signed) * 2.0**-52)[near].all()
        assert (e.radius == rad)[near & (lo == 0)].all()


def _down(x: Fraction) -> float:
    value = float(x)
    return math.nextafter(value, 0.0) if Fraction(value) > x else value


def test_ulp_straddling_a_power_of_two_is_covered():
    y = np.array([1.0 + 2.0**-7], dtype=BF16.dtype)
    e = measure(y, enclosure([1.0], 0.0, [1e-9]), BF16)
    # Below 1 the spacing is 2^-8, above 2^-7: the error is one or two ULP.
    assert e.ulp[0] == 1.0
    assert e.ulp[0] + e.ulp_radius[0] >= 2.0
    # And from below: the error may be one ULP of the binade above.
    e = measure(y, enclosure([1.0 - 2.0**-30], 0.0, [2.0**-20]), BF16)
    assert e.ulp[0] == pytest.approx(2.0)
    assert e.ulp[0] - e.ulp_radius[0] <= 1.0
    below = measure(y, enclosure([1.0], [-1e-30]), BF16)
    assert below.ulp[0] == pytest.approx(2.0)


def test_far_fp64_values_are_infinitely_wrong_but_finite():
    e = measure(np.array([-1.7e308]), enclosure([1.7e308]), FP64)
    assert e.finite[0]
    assert e.absolute[0] == np.inf
    assert np.isfinite(e.radius[0])
    assert e.absolute[0] - e.radius[0] > 1e308


def test_shape_and_dtype_are_checked():
    with pytest.raises(ValueError, match=r"shape \[2, 3\], its enclosure \[3\]"):
        measure(np.zeros((2, 3), dtype=np.float32), enclosure([1.0, 2.0, 3.0]), FP32)
    with pytest.raises(ValueError, match="float32, but bf16"):
        measure(np.zeros(1, dtype=np.float32), enclosure([1.0]), BF16)


def rounds(fmt, observed, hi, lo=0.0, rad=0.0):
    stored = np.atleast_1d(np.asarray(observed, dtype=np.float64)).astype(fmt.dtype)
    return measure(stored, enclosure(hi, lo, rad, shape=stored.shape), fmt).exact


@SHORT
def test_exact_decides_every_tie_and_its_sides(fmt):
    # Adjacent low < high; the exact value sits on their middle, or off it by far less than float64 resolves.
    up = finite_ladder(fmt)
    low, high = up[:-1], up[1:]
    middle = (low + high) / 2
    position = np.arange(len(up)) - np.searchsorted(up, 0.0)
    even = position[:-1] % 2 == 0
    whisker = np.abs(middle) * 2.0**-70 + 1e-300
    for side, low_wins, high_wins in [(0.0, even, ~even), (-1.0, True, False), (1.0, False, True)]:
        assert np.array_equal(rounds(fmt, low, middle, side * whisker), np.broadcast_to(low_wins, low.shape))
        assert np.array_equal(rounds(fmt, high, middle, side * whisker), np.broadcast_to(high_wins, low.shape))
    # A radius that reaches over the middle leaves both undecided, one that does not reach it decides.
    assert not rounds(fmt, low, middle, -whisker, 2 * whisker).any()
    assert not rounds(fmt, high, middle, whisker, 2 * whisker).any()
    assert rounds(fmt, low, middle, -2 * whisker, whisker).all()
    assert rounds(fmt, high, middle, 2 * whisker, whisker).all()
    assert rounds(fmt, up, up).all()
    assert not rounds(fmt, low, high).any()
    assert not rounds(fmt, high, low).any()


@EVERY
def test_exact_agrees_with_rounding(fmt):
    rng = np.random.default_rng(2)
    low_end, high_end = max(fmt.emin - fmt.precision - 2, -1074), min(fmt.emax + 1, 1023)
    x = np.ldexp(rng.uniform(-2, 2, 50_000), rng.integers(low_end, high_end, 50_000).astype(int))
    y = fmt.round(x)
    inner = np.isfinite(y)
    # A format without infinity says nothing of what is too large for it.
    assert rounds(fmt, y, x)[inner | fmt.infinite].all()
    for other in (fmt.next_up(y), fmt.next_down(y)):
        changed = inner & (other != y)
        assert changed.any()
        assert not rounds(fmt, other, x)[changed].any()


@pytest.mark.parametrize("fmt", [FP16, BF16, FP32, TF32], ids=lambda f: f.name)
def test_infinity_is_exact_from_the_threshold_on(fmt):
    t = fmt.overflow_threshold
    whisker = t * 2.0**-80
    for sign in (1, -1):
        inf = sign * np.inf
        for lo, rad, expected in [
            (0, 0, True),
            (-whisker, 0, False),
            (whisker, 0, True),
            (whisker, 2 * whisker, False),
        ]:
            assert rounds(fmt, inf, sign * t, sign * lo, rad)[0] == expected
        assert not rounds(fmt, -inf, sign * t)[0]
        assert rounds(fmt, sign * fmt.max_finite, sign * t, -sign * whisker)[0]
        assert not rounds(fmt, sign * fmt.max_finite, sign * t)[0]
        assert not rounds(fmt, np.nan, sign * t)[0]
    assert not rounds(FP64, np.inf, 1.7e308)[0]


def test_both_zeros_are_exact_for_zero_and_for_what_underflows():
    for zero in (0.0, -0.0):
        for exact in (0.0, 2.0**-26, -(2.0**-26), 2.0**-25, 1e-300):
            assert rounds(FP16, zero, exact)[0]
        assert not rounds(FP16, zero, np.nextafter(2.0**-25, 1))[0]
        assert rounds(FP64, zero, 0.0)[0]
        assert not rounds(FP64, zero, 5e-324)[0]


def test_a_float32_that_is_no_tf32_is_never_exact():
    assert rounds(TF32, 1.0, 1.0)[0]
    assert not rounds(TF32, 1 + 2.0**-23, 1 + 2.0**-23)[0]
