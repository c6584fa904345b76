"""Formats against witnesses that share nothing with them: bit fields, integers, Fractions, numpy's casts."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from oracle.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, TF32, format_named, format_of

pytestmark = pytest.mark.filterwarnings("error")

# name: (stored bits, fraction bits, exponent bias), from the standards, not from the module under test
LAYOUT = {
    "fp16": (16, 10, 15),
    "bf16": (16, 7, 127),
    "fp32": (32, 23, 127),
    "tf32": (19, 10, 127),
    "fp64": (64, 52, 1023),
    "e4m3": (8, 3, 7),
    "e5m2": (8, 2, 15),
}
SHORT = pytest.mark.parametrize("fmt", [FP16, BF16, E4M3, E5M2], ids=lambda f: f.name)
EIGHT = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def bits_of(fmt):
    return np.uint8 if LAYOUT[fmt.name][0] == 8 else np.uint16


def every_pattern(fmt):
    """All 2^8 or 2^16 patterns in the storage dtype."""
    return np.arange(2 ** LAYOUT[fmt.name][0]).astype(bits_of(fmt)).view(fmt.dtype)


def decode(bits: int, name: str) -> Fraction | None:
    """The exact value of a finite bit pattern; None for inf and NaN."""
    width, fraction_bits, bias = LAYOUT[name]
    sign = -1 if bits >> (width - 1) else 1
    exponent = (bits >> fraction_bits) & ((1 << (width - 1 - fraction_bits)) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    last = exponent == (1 << (width - 1 - fraction_bits)) - 1
    if last and (name != "e4m3" or fraction == (1 << fraction_bits) - 1):
        return None
    if exponent == 0:
        return sign * Fraction(fraction) * Fraction(2) ** (1 - bias - fraction_bits)
    return sign * Fraction(fraction + (1 << fraction_bits)) * Fraction(2) ** (exponent - bias - fraction_bits)


def ladder(fmt):
    """All finite values >= 0 in order, as float64, and infinity."""
    top = {"fp16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7F, "e5m2": 0x7C}[fmt.name]
    return np.array([*(float(decode(b, fmt.name)) for b in range(top)), np.inf])


def rounded_exactly(x: Fraction, name: str) -> float:
    """x rounded to nearest, ties to even, in integers only."""
    _, fraction_bits, bias = LAYOUT[name]
    magnitude = abs(x)
    if magnitude == 0:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, 1 - bias) - fraction_bits)
    steps = round(magnitude / quantum)  # Fraction rounds half to even
    value = steps * quantum
    largest = Fraction(448) if name == "e4m3" else (2 - Fraction(1, 2**fraction_bits)) * Fraction(2) ** bias
    beyond = "nan" if name == "e4m3" else "inf"
    return float(beyond if value > largest else value) * (1 if x > 0 else -1)


def double_spread(rng, fmt, n):
    """float64 numbers over the whole range of the format and beyond it, with random significands."""
    exponents = rng.integers(fmt.emin - fmt.precision - 3, fmt.emax + 2, n)
    x = np.ldexp(rng.uniform(1, 2, n), np.clip(exponents, -1074, 1023).astype(int)) * rng.choice([-1, 1], n)
    return x[np.isfinite(x)]


# ---- every pattern of the 16-bit formats


@SHORT
def test_values_are_those_of_the_bit_fields(fmt):
    stored = every_pattern(fmt)
    with np.errstate(invalid="ignore"):
        wide = stored.astype(np.float64)
    exact = [decode(b, fmt.name) for b in range(len(stored))]
    assert all((e is None) == (not np.isfinite(w)) for e, w in zip(exact, wide, strict=True))
    assert all(e is None or e == Fraction(float(w)) for e, w in zip(exact, wide, strict=True))
    assert max(e for e in exact if e is not None) == Fraction(fmt.max_finite)
    assert min(e for e in exact if e is not None and e > 0) == Fraction(fmt.smallest_subnormal)


@SHORT
def test_store_gives_every_pattern_back(fmt):
    stored = every_pattern(fmt)
    with np.errstate(invalid="ignore"):
        wide = stored.astype(np.float64)
    nan = np.isnan(wide)
    back = fmt.store(wide)
    assert back.dtype == stored.dtype
    bits = bits_of(fmt)
    assert np.array_equal(back.view(bits)[~nan], stored.view(bits)[~nan])  # signed zeros included
    assert np.isnan(back[nan].astype(np.float64)).all()
    assert nan.sum() > 0


@SHORT
def test_neighbours_walk_the_whole_ladder(fmt):
    up = ladder(fmt)
    whole = np.concatenate([-up[:0:-1], up])
    assert np.array_equal(fmt.next_up(whole[:-1]), whole[1:])
    assert np.array_equal(fmt.next_down(whole[1:]), whole[:-1])
    assert fmt.next_up(-0.0) == up[1]
    assert fmt.next_down(0.0) == -up[1]
    assert fmt.next_down(-0.0) == -up[1]
    assert fmt.next_up(np.inf) == np.inf
    assert fmt.next_down(-np.inf) == -np.inf
    assert np.isnan(fmt.next_up(np.nan))


@SHORT
def test_ulp_is_the_distance_to_the_next_above(fmt):
    up = ladder(fmt)
    spacing = np.diff(up)
    spacing[-1] = spacing[-2]  # at the largest finite number: its binade's spacing, not infinity
    assert np.array_equal(fmt.ulp(up[:-1]), spacing)
    assert np.array_equal(fmt.ulp(-up[:-1]), spacing)
    assert np.array_equal(fmt.ulp(up[:-1] + spacing / 2), spacing)  # reals between two numbers
    assert fmt.ulp(np.inf) == spacing[-1]
    assert np.isnan(fmt.ulp(np.nan))


@SHORT
def test_ties_and_their_sides_round_as_the_bits_say(fmt):
    up = ladder(fmt)
    low, high = up[:-1].copy(), up[1:].copy()
    beyond = 2 * low[-1] - low[-2]
    middle = np.append((low[:-1] + high[:-1]) / 2, (low[-1] + beyond) / 2)
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    if not fmt.infinite:
        high[-1] = np.nan
    for sign in (1.0, -1.0):
        assert np.array_equal(fmt.round(sign * middle), sign * even)
        assert np.array_equal(fmt.round(sign * np.nextafter(middle, 0)), sign * low)
        assert np.array_equal(fmt.round(sign * np.nextafter(middle, np.inf)), sign * high, equal_nan=True)
    assert middle[-1] == fmt.overflow_threshold


def test_the_tie_check_catches_double_rounding():
    # Through float32 first, a number just above a bf16 tie becomes the tie and then goes the wrong way.
    above = np.nextafter(1 + 2.0**-8, 2)
    assert float(np.float64(above).astype(np.float32).astype(ml_dtypes.bfloat16)) == 1.0
    assert BF16.round(above) == 1 + 2.0**-7


@pytest.mark.parametrize(("fmt", "cast"), [(FP16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["fp16", "bf16"])
def test_float32_inputs_round_as_the_public_casts_do(fmt, cast):
    bits = np.random.default_rng(1).integers(0, 2**32, 400_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    narrow = np.concatenate([x, np.linspace(-7e4, 7e4, 100_001, dtype=np.float32), np.float32(2) ** -np.arange(149)])
    with np.errstate(over="ignore", under="ignore"):
        expected = narrow.astype(cast)
    assert np.array_equal(fmt.store(narrow).view(np.uint16), expected.view(np.uint16))


# ---- eight bits: ml_dtypes' casts as the witness


def dense(fmt):
    """float32 numbers around every value of the format: itself, its sides, all middles and their sides, beyond it."""
    up = ladder(fmt)[:-1]
    points = np.concatenate([up, (up[:-1] + up[1:]) / 2, [fmt.overflow_threshold, 2 * up[-1]]]).astype(np.float32)
    sides = [np.nextafter(points, np.float32(d)) for d in (-1e9, 1e9)]
    small = np.linspace(0, 8 * fmt.smallest_normal, 20_001, dtype=np.float32)
    wide = np.linspace(0, 1.2 * fmt.max_finite, 100_001, dtype=np.float32)
    x = np.concatenate([points, *sides, small, wide])
    return np.concatenate([x, -x])


@EIGHT
def test_dense_samples_round_as_the_public_casts_do(fmt):
    x = dense(fmt)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = x.astype(fmt.dtype)
    mine, nan = fmt.store(x), np.isnan(expected.astype(np.float32))
    assert np.array_equal(mine.view(np.uint8)[~nan], expected.view(np.uint8)[~nan])
    assert np.array_equal(np.isnan(mine.astype(np.float32)), nan)
    assert nan.any() == (fmt is E4M3)


@EIGHT
def test_saturation_is_a_choice(fmt):
    x = np.concatenate([dense(fmt), [np.inf, -np.inf, 1e30]])
    kept, free = fmt.round(x, saturate=True), fmt.round(x)
    inside = np.isfinite(free)
    assert np.array_equal(kept[inside], free[inside])
    assert np.array_equal(kept[~inside], np.copysign(fmt.max_finite, x[~inside]))
    assert (~inside).sum() > 100
    assert np.isnan(fmt.round(np.nan, saturate=True))
    assert np.isnan(fmt.round(np.inf)) == (fmt is E4M3)
    assert np.array_equal(fmt.store(x, saturate=True).astype(np.float64), kept)


def test_e4m3_has_two_nans_and_no_infinity():
    with np.errstate(invalid="ignore"):
        wide = every_pattern(E4M3).astype(np.float64)
    assert np.flatnonzero(np.isnan(wide)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(wide).any()
    assert wide[0x7E] == 448.0
    assert E4M3.round(464.0) == 448.0
    assert np.isnan(E4M3.round(464.1))
    with np.errstate(invalid="ignore"):
        assert np.isinf(every_pattern(E5M2).astype(np.float64)).sum() == 2
    assert E5M2.max_finite == 57344.0


@EIGHT
def test_eight_bits_hold_what_ml_dtypes_says(fmt):
    info = ml_dtypes.finfo(fmt.dtype)
    assert (float(info.max), float(info.tiny)) == (fmt.max_finite, fmt.smallest_normal)
    assert float(info.smallest_subnormal) == fmt.smallest_subnormal
    assert float(info.eps) == 2 * fmt.unit_roundoff


# ---- every format


@EVERY
def test_constants(fmt):
    _, fraction_bits, bias = LAYOUT[fmt.name]
    assert fmt.precision == fraction_bits + 1
    # Without infinities the all-ones exponent holds numbers, all of its significands but one.
    assert fmt.emax == (bias if fmt.infinite else bias + 1)
    assert fmt.emin == 1 - bias
    assert Fraction(fmt.unit_roundoff) == Fraction(1, 2 ** (fraction_bits + 1))
    assert Fraction(fmt.smallest_normal) == Fraction(2) ** (1 - bias)
    assert Fraction(fmt.smallest_subnormal) == Fraction(2) ** (1 - bias - fraction_bits)
    if fmt is not E4M3:
        assert Fraction(fmt.max_finite) == (2 - Fraction(1, 2**fraction_bits)) * Fraction(2) ** bias
    assert fmt.omega == (5e-324 if fmt is FP64 else fmt.smallest_subnormal / 2)
    if fmt in (FP16, FP32, FP64, BF16):
        info = ml_dtypes.finfo(fmt.dtype)
        assert float(info.max) == fmt.max_finite
        assert float(info.smallest_subnormal) == fmt.smallest_subnormal
        assert float(info.tiny) == fmt.smallest_normal
        assert float(info.eps) == 2 * fmt.unit_roundoff


@EVERY
def test_rounding_equals_integer_arithmetic(fmt):
    x = double_spread(np.random.default_rng(2), fmt, 4000)
    x = np.concatenate([x, fmt.round(x[:500]), [fmt.max_finite, -fmt.max_finite, np.finfo(np.float64).max]])
    x = x[np.isfinite(x)]
    expected = [rounded_exactly(Fraction(float(v)), fmt.name) for v in x]
    assert np.array_equal(fmt.round(x), expected, equal_nan=not fmt.infinite)


@EVERY
def test_the_overflow_threshold_is_where_infinity_begins(fmt):
    t = fmt.overflow_threshold
    if fmt is FP64:
        assert t == np.inf
        assert fmt.round(fmt.max_finite) == fmt.max_finite
        return
    assert Fraction(t) == Fraction(fmt.max_finite) + Fraction(float(fmt.ulp(fmt.max_finite))) / 2
    assert fmt.round(np.nextafter(t, 0)) == fmt.max_finite
    if fmt is E4M3:
        assert fmt.round([t, -t]).tolist() == [448.0, -448.0]
        assert np.isnan(fmt.round([np.nextafter(t, np.inf), np.finfo(np.float64).max])).all()
        return
    assert fmt.round(t) == np.inf
    assert fmt.round(-t) == -np.inf
    assert fmt.round(np.finfo(np.float64).max) == np.inf


@EVERY
def test_rounding_is_idempotent_odd_and_monotone(fmt):
    x = np.sort(double_spread(np.random.default_rng(3), fmt, 20_000))
    y = fmt.round(x)
    assert np.array_equal(fmt.round(y), y, equal_nan=not fmt.infinite)
    assert np.array_equal(fmt.round(-x), -y, equal_nan=not fmt.infinite)
    inside = np.isfinite(y)
    ordered = y if fmt.infinite else y[inside]
    assert (ordered[1:] >= ordered[:-1]).all()
    with np.errstate(under="ignore"):
        assert (np.abs(x - y)[inside] <= np.maximum(fmt.ulp(x) / 2, 0)[inside]).all()


@EVERY
def test_special_values_pass_through(fmt):
    y = fmt.round([np.nan, np.inf, -np.inf, 0.0, -0.0])
    assert np.isnan(y[0])
    if fmt.infinite:
        assert y[1] == np.inf
        assert y[2] == -np.inf
    else:
        assert np.isnan(y[1:3]).all()
    assert np.array_equal(np.signbit(y[3:]), [False, True])
    tiny = fmt.round([-(2.0**-1074), 2.0**-1074])
    assert np.array_equal(np.signbit(tiny), [True, False])  # what underflows to zero keeps its sign


@EVERY
def test_neighbours_and_ulp_on_random_numbers(fmt):
    x = fmt.round(double_spread(np.random.default_rng(4), fmt, 5000))
    x = x[np.isfinite(x) & (np.abs(x) < fmt.max_finite)]
    up = fmt.next_up(x)
    assert (up > x).all()
    assert np.array_equal(fmt.round(up), up)
    assert np.array_equal(fmt.next_down(up), x)
    # Nothing of the format lies between: the exact middle rounds to one of the two.
    middle = [(Fraction(float(a)) + Fraction(float(b))) / 2 for a, b in zip(x, up, strict=True)]
    ends = [rounded_exactly(m, fmt.name) for m in middle]
    assert all(e in (a, b) for e, a, b in zip(ends, x, up, strict=True))
    if fmt in (FP32, FP64):
        own = x.astype(fmt.dtype)
        with np.errstate(under="ignore"):
            assert np.array_equal(up, np.nextafter(own, fmt.dtype(np.inf)).astype(np.float64))
            assert np.array_equal(fmt.ulp(x), np.spacing(np.abs(own)).astype(np.float64))


def test_fp64_ends():
    top = np.finfo(np.float64).max
    assert FP64.next_up(top) == np.inf
    assert FP64.next_down(np.inf) == top
    assert FP64.next_up(-np.inf) == -top
    assert FP64.next_up(0.0) == 5e-324
    assert FP64.ulp(0.0) == 5e-324


def test_tf32_equals_rounding_the_bits_of_float32():
    x = np.random.default_rng(5).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    bits = x.view(np.uint32).astype(np.uint64)
    # Thirteen stored bits are dropped; adding half less the parity rounds to nearest even, and carries into
    # the exponent.
    kept = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13).astype(np.uint32).view(np.float32)
    assert np.array_equal(TF32.round(x), kept.astype(np.float64))
    assert np.array_equal(TF32.store(x), kept)
    assert TF32.store(x).dtype == np.float32


def test_names_and_dtypes():
    for name in ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"):
        assert format_named(name).name == name
    with pytest.raises(ValueError, match=r"unknown format 'fp8'; known: fp64, fp32, tf32, fp16, bf16, e4m3, e5m2"):
        format_named("fp8")
    for fmt in (FP64, FP32, FP16, BF16, E4M3, E5M2):
        assert format_of(np.zeros(2, dtype=fmt.dtype)) is fmt
    with pytest.raises(ValueError, match="int32"):
        format_of(np.zeros(2, dtype=np.int32))
