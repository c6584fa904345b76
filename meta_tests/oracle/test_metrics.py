"""Pooled metrics, against figures worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from meta_tests.oracle.plain_enclosure import enclosure
from oracle.error import measure, summarise
from oracle.formats import BF16, FP16, FP32, FP64

pytestmark = pytest.mark.filterwarnings("error")


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
