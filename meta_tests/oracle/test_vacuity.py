"""Vacuity: a bound that a trivial output keeps is worth nothing."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from meta_tests.oracle.plain_enclosure import enclosure
from oracle.enclosure import Enclosure
from oracle.formats import BF16, FP16, FP32, FP64
from oracle.vacuity import exactly, mean_of_visible, trivial_outputs, uniform_rows, vacuous

pytestmark = pytest.mark.filterwarnings("error")


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
