"""Error intervals, pooled metrics and vacuity, against Fractions and against figures worked out by hand."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from oracle.enclosure import Enclosure
from oracle.error import measure, summarise
from oracle.formats import BF16, FORMATS, FP16, FP32, FP64, TF32
from oracle.vacuity import exactly, mean_of_visible, trivial_outputs, uniform_rows, vacuous

pytestmark = pytest.mark.filterwarnings("error")

SHORT = pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda f: f.name)
EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def every_pattern(fmt):
    return np.arange(2**16, dtype=np.uint16).view(fmt.dtype)


def wide(stored):
    with np.errstate(invalid="ignore"):
        return stored.astype(np.float64)


def enclosure(hi, lo=0.0, rad=0.0, *, shape=None):
    parts = [np.asarray(x, dtype=np.float64) for x in (hi, lo, rad)]
    to = np.broadcast_shapes(*(p.shape for p in parts)) if shape is None else shape
    return Enclosure(*(np.array(np.broadcast_to(p, to)) for p in parts))


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


# ---- total over every bit pattern


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


# ---- the interval holds the exact error


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


# ---- correctly rounded


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


# ---- metrics


def test_metrics_worked_by_hand():
    # bf16, ulp(1) = 2^-7: errors 0, 1 ulp, -2 ulp, of exact values 1.
    y = np.array([[1.0, 1 + 2.0**-7, 1 - 2.0**-6]]).astype(BF16.dtype)
    e = measure(y, enclosure(np.ones((1, 3))), BF16)
    m = summarise([(e, np.full((1, 3), 2.0**-5), np.array([[1.0, 2.0, 8.0]]))])
    assert (m.n, m.undecided, m.nonfinite, m.overflowed, m.exact) == (3, 0, 0, 0, 1)
    assert (m.ulp_max, m.ulp_p999, m.ulp_mean, m.ulp_max_radius) == (2.0, 2.0, 1.0, 0.0)
    assert m.scaled_ulp == 1.0  # u = 2^-8: 2^-7 / (2^-8 2) and 2^-6 / (2^-8 8)
    assert m.bound_ratio == 0.5
    assert m.rms == pytest.approx(2.0**-7 * math.sqrt(5 / 3))
    assert m.normwise == pytest.approx(2.0**-7 * math.sqrt(5 / 3))
    assert m.bias == pytest.approx(-2 / 3)
    assert m.z == pytest.approx((-1 / 3) / (math.sqrt(7 / 3) / math.sqrt(3)))
    assert m.worst.part == 0
    assert m.worst.index == (0, 2)
    assert float.fromhex(m.worst.observed) == 1 - 2.0**-6
    assert float.fromhex(m.worst.exact) == 1.0


def random_part(rng, shape, *, fmt=FP16):
    hi = rng.standard_normal(shape)
    y = fmt.store(hi + 1e-3 * rng.standard_normal(shape))
    e = measure(y, enclosure(hi, hi * 1e-18, 1e-14), fmt)
    return e, np.abs(hi) * 0.01 + 1e-3, np.abs(hi) + 0.1


def figures(m, *, without=()):
    return {k: v for k, v in m.as_dict().items() if k not in ("worst", *without)}


def test_pooling_equals_one_large_block():
    rng = np.random.default_rng(3)
    e, bound, size = random_part(rng, (30, 7))
    cuts = [slice(0, 1), slice(1, 1), slice(1, 20), slice(20, 30)]
    parts = []
    for cut in cuts:
        piece = measure(e.observed[cut], e.enclosure.rows(cut), FP16)
        parts.append((piece, bound[cut], size[cut]))
    whole, pooled = summarise([(e, bound, size)]), summarise(parts)
    assert figures(whole) == pytest.approx(figures(pooled), rel=1e-12)
    at = (cuts[pooled.worst.part].start + pooled.worst.index[0], pooled.worst.index[1])
    assert at == whole.worst.index
    assert pooled.worst.observed == whole.worst.observed
    backwards = summarise(parts[::-1])
    assert figures(backwards) == pytest.approx(figures(whole), rel=1e-12)


def test_the_worst_is_by_bound_and_by_ulp_without_one():
    y = np.array([1.25, 3.0], dtype=np.float16)
    e = measure(y, enclosure([1.0, 2.0]), FP16)
    assert summarise([(e, np.array([0.25, 100.0]), None)]).worst.index == (0,)
    assert summarise([(e, None, None)]).worst.index == (1,)
    assert summarise([(e, np.array([np.inf, np.nan]), None)]).worst.index == (1,)
    # A part with a bound goes before one without.
    assert (
        summarise([(e, None, None), (e, np.array([9.0, 1.0]), None)]).worst
        == summarise([(e, None, None), (e, np.array([9.0, 1.0]), None)]).worst
    )
    assert summarise([(e, None, None), (e, np.array([9.0, 10.0]), None)]).worst.part == 1


def test_what_is_not_counted_changes_nothing():
    y = np.array([1.0, np.nan, 7.0], dtype=np.float16)
    counted = np.array([True, False, True])
    all_of_it = measure(y, enclosure([1.0, 1.0, 7.5]), FP16, counted=counted)
    without = measure(y[counted], enclosure([1.0, 7.5]), FP16)
    assert figures(summarise([(all_of_it, None, None)])) == figures(summarise([(without, None, None)]))
    assert summarise([(all_of_it, None, None)]).worst.index == (2,)


def test_a_nan_is_infinitely_wrong_and_the_worst():
    y = np.array([1.0, np.nan, 2.0], dtype=np.float16)
    m = summarise([(measure(y, enclosure([1.0, 1.0, 1.0]), FP16), np.ones(3), np.ones(3))])
    assert (m.n, m.nonfinite, m.exact) == (3, 1, 1)
    assert m.ulp_max == m.ulp_p999 == m.ulp_mean == m.rms == m.normwise == m.bound_ratio == m.scaled_ulp == np.inf
    assert m.bias == 0.5 / FP16.unit_roundoff
    assert m.worst.index == (1,)
    assert m.worst.observed == "nan"


def test_an_infinity_that_is_right_is_counted_apart():
    y = np.array([np.inf, 1.0, np.inf], dtype=np.float16)
    m = summarise([(measure(y, enclosure([7e4, 1.0, 6e4]), FP16), None, None)])
    assert (m.n, m.overflowed, m.nonfinite, m.exact) == (2, 1, 1, 2)


def test_undecided_elements_are_in_no_figure():
    y = np.array([1.0, 5.0], dtype=np.float16)
    m = summarise([(measure(y, enclosure([1.0, 1.0], 0.0, [0.0, np.inf]), FP16), np.ones(2), None)])
    assert (m.n, m.undecided, m.ulp_max, m.bound_ratio, m.exact) == (1, 1, 0.0, 0.0, 1)


def test_bounds_of_zero_inf_and_nan():
    y = np.array([1.0, 1.0, 3.0, 3.0], dtype=np.float16)
    e = measure(y, enclosure([1.0, 1.0, 1.0, 1.0]), FP16)
    assert summarise([(e, np.array([0.0, np.nan, np.inf, 8.0]), None)]).bound_ratio == 0.25
    assert summarise([(e, np.array([0.0, 1.0, 0.0, 1.0]), None)]).bound_ratio == np.inf
    assert summarise([(e, np.full(4, np.inf), None)]).bound_ratio is None
    right = measure(np.ones(2, dtype=np.float16), enclosure(np.ones(2)), FP16)
    assert summarise([(right, np.zeros(2), None)]).bound_ratio == 0.0


def test_nothing_to_compare():
    empty = measure(np.zeros((0, 3), dtype=np.float16), enclosure(np.zeros((0, 3))), FP16)
    for parts in ([], [(empty, None, None)], [(empty, np.zeros((0, 3)), np.zeros((0, 3)))]):
        m = summarise(parts)
        assert m.n == 0
        assert m.worst is None
        assert m.ulp_max is None
        assert m.bias is None
        assert m.rms is None
        json.dumps(m.as_dict(), allow_nan=False)


def test_bias_sees_one_signed_errors():
    rng = np.random.default_rng(4)
    hi = rng.standard_normal(4000)
    honest, low = FP32.store(hi), np.nextafter(FP32.store(hi), np.float32(-np.inf))
    fair, skewed = (summarise([(measure(y, enclosure(hi), FP32), None, None)]) for y in (honest, low))
    assert abs(fair.z) < 4
    assert skewed.z < -50
    assert skewed.bias < -0.5
    same = measure(np.full(5, 1.5, dtype=np.float32), enclosure(np.ones(5)), FP32)
    assert summarise([(same, None, None)]).z == np.inf
    assert summarise([(measure(np.ones(5, dtype=np.float32), enclosure(np.ones(5)), FP32), None, None)]).z is None


def test_norms_do_not_overflow_or_vanish():
    for scale in (1e-300, 1.0, 1e300):
        y = np.array([3.0, 4.0]) * scale
        m = summarise([(measure(y, enclosure(y * 2), FP64), None, None)])
        assert m.rms == pytest.approx(5 * scale / math.sqrt(2))
        assert m.normwise == pytest.approx(0.5)


def test_formats_are_not_mixed():
    parts = [random_part(np.random.default_rng(5), (2, 2), fmt=f) for f in (FP16, BF16)]
    with pytest.raises(ValueError, match="bf16, fp16"):
        summarise(parts)


def test_metrics_survive_json():
    rng = np.random.default_rng(6)
    e, bound, size = random_part(rng, (5, 5))
    m = summarise([(e, bound, size)])
    text = json.dumps(m.as_dict(), allow_nan=False)
    assert json.loads(text) == m.as_dict()
    worst = json.loads(text)["worst"]
    at = tuple(worst["index"])
    assert float.fromhex(worst["observed"]) == float(e.observed[at])
    assert float.fromhex(worst["exact"]) == e.enclosure.hi[at]
    assert float.fromhex(worst["exact_low"]) == e.enclosure.lo[at]
    spoiled = summarise([(measure(np.array([np.nan], dtype=np.float16), enclosure([1.0]), FP16), np.ones(1), None)])
    assert json.loads(json.dumps(spoiled.as_dict(), allow_nan=False))["ulp_max"] == "inf"


# ---- vacuity (G6)


def softmax_attention(scores, visible, v):
    p = np.where(visible, np.exp(scores - scores.max()), 0.0)
    return p / p.sum(axis=1, keepdims=True) @ v


def attention_part(scores, visible, v, bound):
    exact = enclosure(softmax_attention(scores, visible, v), 0.0, 1e-13)
    return (
        exact,
        np.broadcast_to(bound, exact.hi.shape),
        trivial_outputs(exact, {"mean": mean_of_visible(visible, v)}),
    )


def small_attention(seed=7, spread=2.0):
    rng = np.random.default_rng(seed)
    return spread * rng.standard_normal((6, 9)), np.tri(6, 9, 3, dtype=bool), rng.standard_normal((9, 4))


def test_a_sharp_bound_is_not_vacuous_and_a_loose_one_is():
    scores, visible, v = small_attention()
    part = attention_part(scores, visible, v, 1e-3)
    assert vacuous([part], BF16) == ()
    everything = attention_part(scores, visible, v, 2 * np.abs(v).max() + 1)
    assert vacuous([everything], BF16) == ("zeros", "negated", "mean")


def test_each_trivial_output_is_named_alone():
    scores, visible, v = small_attention()
    exact, _, others = attention_part(scores, visible, v, 1.0)
    for name, trivial in others.items():
        bound = np.abs(BF16.round(trivial.hi) - exact.hi) * 1.001 + 1e-12
        # What accepts twice the distance to zero accepts zero.
        assert vacuous([(exact, bound, others)], BF16) == (("zeros", "negated") if name == "negated" else (name,))


def test_one_element_that_rejects_is_enough():
    scores, visible, v = small_attention()
    exact, bound, others = attention_part(scores, visible, v, 100.0)
    sharp = np.array(bound)
    sharp[3, 2] = 1e-3 * np.abs(exact.hi[3, 2])
    assert vacuous([(exact, sharp, others)], BF16) == ()
    assert vacuous([(exact, bound, others), (exact, sharp, others)], BF16) == ()
    assert vacuous([(exact, bound, others), (exact, bound, others)], BF16) == ("zeros", "negated", "mean")


@pytest.mark.parametrize("fmt", [FP64, FP32, FP16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["constant V", "one key", "equal scores"])
def test_a_mean_that_is_the_answer_is_not_held_against_the_check(fmt, kind):
    scores, visible, v = small_attention()
    v = fmt.round(v)
    if kind == "constant V":
        v = np.repeat(fmt.round(v[:1] * 0 + 0.1), 9, axis=0)
    elif kind == "one key":
        visible = np.eye(6, 9, dtype=bool)
    else:
        scores = np.zeros_like(scores)
    # The honest bound of a short sum: it accepts the mean, and rightly so.
    bound = 12 * fmt.unit_roundoff * np.abs(v).max() + 1e-12
    assert vacuous([attention_part(scores, visible, v, bound)], fmt) == ()


def test_zero_v_is_no_vacuity_but_a_tiny_v_under_the_bound_is():
    scores, visible, v = small_attention()
    assert vacuous([attention_part(scores, visible, 0 * v, 1e-6)], FP16) == ()
    assert vacuous([attention_part(scores, visible, 1e-5 * v, 1e-3)], FP16) == ("zeros", "negated", "mean")


def test_the_mean_is_right_in_some_rows_and_wrong_in_others():
    # The first row sees one key, so that its mean is right: the wrong rows decide.
    scores, visible, v = small_attention()
    visible = np.tri(6, 9, dtype=bool)
    exact, bound, others = attention_part(scores, visible, v, 10.0)
    assert "mean" in vacuous([(exact, bound, others)], BF16)
    wrong = np.array(bound)
    wrong[1:] = 1e-4
    assert vacuous([(exact, wrong, others)], BF16) == ()


def test_elements_without_a_promise():
    scores, visible, v = small_attention()
    exact, bound, others = attention_part(scores, visible, v, 1e-3)
    some = np.array(bound)
    some[:5] = np.inf
    some[5, 0] = np.nan
    assert vacuous([(exact, some, others)], BF16) == ()
    for nothing in (np.inf, np.nan):
        assert vacuous([(exact, np.full_like(some, nothing), others)], BF16) == ("zeros", "negated", "mean")
    # An exempt row must not make a trivial output wrong that is right wherever something is promised.
    zero_elsewhere = exact.hi.copy()
    zero_elsewhere[1:] = 0.0
    rows = enclosure(zero_elsewhere)
    first_exempt = np.full_like(some, 1e-6)
    first_exempt[0] = np.inf
    assert vacuous([(rows, first_exempt, trivial_outputs(rows))], BF16) == ()


def test_one_wrong_block_is_enough_for_vacuity():
    scores, visible, v = small_attention()
    wrong, right = attention_part(scores, visible, v, 10.0), attention_part(0 * scores, visible, v, 10.0)
    assert vacuous([right], BF16) == ("zeros", "negated")
    assert vacuous([right, wrong], BF16) == ("zeros", "negated", "mean")


def one_element(exact, rad, trivial, bound, trivial_rad=0.0):
    parts = [(enclosure([[exact]], 0.0, rad), np.array([[bound]]), {"it": enclosure([[trivial]], 0.0, trivial_rad)})]
    return vacuous(parts, BF16) == ("it",)


def test_wrong_means_more_than_one_ulp_beyond_all_radii():
    ulp = 2.0**-7
    assert one_element(1.0, 0.0, 1 + 1.01 * ulp, 1.0)
    assert not one_element(1.0, 0.0, 1 + 0.99 * ulp, 1.0)
    assert not one_element(1.0, 0.02 * ulp, 1 + 1.01 * ulp, 1.0)
    assert not one_element(1.0, 0.0, 1 + 1.01 * ulp, 1.0, trivial_rad=0.02 * ulp)
    assert one_element(1.0, 0.01 * ulp, 1 + 1.03 * ulp, 1.0, trivial_rad=0.01 * ulp)


def test_accepted_means_that_the_rounded_output_would_pass():
    assert one_element(1.0, 0.0, 1.25, 0.25)
    assert not one_element(1.0, 0.0, 1.25, 0.2499)
    # A target that is not proven to pass is not accepted.
    assert not one_element(1.0, 0.01, 1.25, 0.255)
    assert one_element(1.0, 0.01, 1.25, 0.265)
    # 1.2539 rounds to 1.25 in bf16, and that is what a target would return.
    assert one_element(1.0, 0.0, 1.2539, 0.25)
    assert not one_element(1.0, 0.0, 1.2461, 0.2499)


def test_undecided_elements_accept_nothing_and_nothing_is_vacuous_without_elements():
    scores, visible, v = small_attention()
    exact, bound, others = attention_part(scores, visible, v, 100.0)
    unknown = Enclosure(exact.hi, exact.lo, np.full_like(exact.rad, np.inf))
    assert vacuous([(unknown, bound, others)], BF16) == ()
    none = enclosure(np.zeros((0, 4)))
    assert vacuous([], BF16) == ()
    assert vacuous([(none, np.zeros((0, 4)), trivial_outputs(none))], BF16) == ()


def test_parts_must_agree_on_the_names():
    exact = enclosure(np.ones((2, 2)))
    with pytest.raises(ValueError, match="same trivial outputs"):
        vacuous([(exact, exact.hi, trivial_outputs(exact)), (exact, exact.hi, {})], FP32)


def test_mean_of_visible_holds_the_exact_mean():
    rng = np.random.default_rng(8)
    visible = rng.random((20, 50)) < 0.4
    visible[3] = False
    v = np.ldexp(rng.standard_normal((50, 5)), rng.integers(-40, 40, (50, 5)))
    mean = mean_of_visible(visible, v)
    for i in range(20):
        for c in range(5):
            seen = [Fraction(float(x)) for x in v[visible[i], c]]
            exact = sum(seen, Fraction(0)) / max(len(seen), 1)
            assert abs(exact - Fraction(float(mean.hi[i, c]))) <= Fraction(float(mean.rad[i, c]))
    v[7] = [np.nan, np.inf, -np.inf, np.nan, 1.0]
    assert np.isfinite(mean_of_visible(visible, v).hi).all()


def test_uniform_rows_and_exact_values():
    visible = np.array([[True, True, True, False], [False] * 4])
    share = uniform_rows(visible)
    assert np.array_equal(share.hi, [[1 / 3, 1 / 3, 1 / 3, 0], [0] * 4])
    assert abs(Fraction(1, 3) - Fraction(1 / 3)) <= Fraction(float(share.rad[0, 0]))
    x = np.array([1.5, -2.0], dtype=BF16.dtype)
    assert np.array_equal(exactly(x).hi, [1.5, -2.0])
    assert not exactly(x).rad.any()


def test_softmax_uniform_row_is_vacuous_only_where_it_is_wrong():
    n = 4096
    flat, tilted = np.zeros((2, n)), np.linspace(-1, 1, n) * np.ones((2, 1))
    visible = np.ones((2, n), dtype=bool)
    for x, expected in [(flat, ()), (tilted, ("zeros", "negated", "uniform"))]:
        p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        exact = enclosure(p, 0.0, 1e-18)
        others = trivial_outputs(exact, {"uniform": uniform_rows(visible)})
        got = vacuous([(exact, np.full(p.shape, 1e-2), others)], FP32)
        assert got == (expected or ("zeros", "negated"))
        assert vacuous([(exact, 1e-3 * p, others)], FP32) == ()
