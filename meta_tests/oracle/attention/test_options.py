"""Attention's options (window, soft cap, ALiBi, bias, sinks): formula against witness, enclosures, orders, refusals."""

from __future__ import annotations

from typing import Any

import flint
import mpmath
import numpy as np
import pytest

from meta_tests.witnesses.attention import DIGITS, case_of, entries, witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.case import Case, load_case, save_case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import formula as attention
from oracle.ops.attention.options import CHOICES
from oracle.ops.contracts import declared_forms


def option_cases() -> dict[str, Case]:
    """Named cases of each option, at its edges and with the others."""
    rng = np.random.default_rng(17)
    base = case_of(rng, (1, 2, 1, 4, 6, 3, 2))
    many = case_of(rng, (2, 4, 2, 3, 5, 4, 2))
    square = case_of(rng, (1, 1, 1, 5, 5, 3, 2))
    sinks, slopes = np.array([0.7, -1.5]), np.array([0.5, 0.0625])
    bias = 2 * rng.standard_normal((1, 2, 4, 6))
    cases = {}
    for alignment in ("top_left", "bottom_right"):
        for left in ("included", "excluded"):
            for window in ((2, 1), (0, 0), (-1, 0), (1, -1), (0, -1), (-1, -1), (3, 0)):
                options = {"window_size": window, "causal_alignment": alignment, "window_left": left}
                cases[f"window {window} {alignment} {left}"] = base.with_options(**options)
            cases[f"causal window {alignment} {left}"] = base.with_options(
                window_size=(1, 2), is_causal=True, causal_alignment=alignment, window_left=left
            )
    rows_without = case_of(rng, (1, 1, 1, 7, 3, 2, 1), window_size=(1, 0))
    cases |= {
        "window leaves rows empty": rows_without,
        "window leaves rows empty, sinks": rows_without.with_options(sinks=np.array([0.5])),
        "cap": base.with_options(softcap=1.5),
        "cap tiny": base.with_options(softcap=1e-3),
        "cap 1e-300": base.with_options(softcap=1e-300),
        "cap huge": base.with_options(softcap=1e6),
        "cap 1e300": base.with_options(softcap=1e300),
        "cap under 1e6": base.with_arrays(q=base.arrays["q"] * 1e6).with_options(softcap=50.0),
        "cap at scale 0": base.with_options(softcap=3.0, scale=0.0),
        "cap at a negative scale": base.with_options(softcap=3.0, scale=-1.0),
        "cap before bias": base.with_options(softcap=2.0, attn_mask=bias),
        "cap after bias": base.with_options(softcap=2.0, attn_mask=bias, softcap_order="after_mask"),
        "cap after a bias of -1e30": base.with_options(
            softcap=2.0, attn_mask=np.where(rng.random(bias.shape) < 0.5, -1e30, bias), softcap_order="after_mask"
        ),
        "cap before a bias of -1e30": base.with_options(
            softcap=2.0, attn_mask=np.where(rng.random(bias.shape) < 0.5, -1e30, bias)
        ),
        "alibi": base.with_options(alibi_slopes=slopes),
        "alibi by index": base.with_options(alibi_slopes=slopes, alibi_bias="key_index"),
        "alibi bottom right": base.with_options(alibi_slopes=slopes, causal_alignment="bottom_right", is_causal=True),
        "alibi of each batch": many.with_options(alibi_slopes=rng.random((2, 4))),
        "alibi of each batch, by index": many.with_options(alibi_slopes=rng.random((2, 4)), alibi_bias="key_index"),
        "alibi zero": base.with_options(alibi_slopes=np.zeros(2)),
        "alibi huge": base.with_options(alibi_slopes=np.array([1e4, 1e30])),
        "alibi negative": base.with_options(alibi_slopes=-slopes),
        "alibi in float64": base.with_options(alibi_slopes=np.array([np.pi, 1 / 3])),
        "alibi in bf16": base.with_options(alibi_slopes=FORMATS["bf16"].store(slopes)),
        "alibi and bias": base.with_options(alibi_slopes=slopes, attn_mask=bias),
        "alibi under a cap": base.with_options(alibi_slopes=slopes, softcap=1.0),
        "alibi in a cap": base.with_options(alibi_slopes=slopes, softcap=1.0, softcap_order="after_mask"),
        "sinks": base.with_options(sinks=sinks),
        "sinks left out of L": base.with_options(sinks=sinks, lse_sink="excluded"),
        "sinks in bf16": base.with_options(sinks=FORMATS["bf16"].store(sinks)),
        "sinks far above": base.with_options(sinks=np.array([1e4, 1e8])),
        "sinks far above, left out of L": base.with_options(sinks=np.array([1e4, 1e8]), lse_sink="excluded"),
        "sinks far below": base.with_options(sinks=np.array([-1e4, -1e300])),
        "sinks of -inf": base.with_options(sinks=np.array([-np.inf, 0.0])),
        "sinks over whole rows at -1e30": base.with_options(sinks=sinks, attn_mask=np.full((1, 1, 4, 6), -1e30)),
        "sinks of each head": many.with_options(sinks=rng.standard_normal(4), is_causal=True),
        "bias": base.with_options(attn_mask=bias, is_causal=True),
        "all": square.with_options(
            sinks=np.array([0.3]),
            softcap=2.5,
            alibi_slopes=np.array([0.3]),
            attn_mask=rng.standard_normal((5, 5)),
            window_size=(2, 1),
            is_causal=True,
        ),
        "all, the other meanings": square.with_options(
            sinks=np.array([0.3]),
            softcap=2.5,
            alibi_slopes=np.array([0.3]),
            attn_mask=rng.random((5, 5)) < 0.8,
            window_size=(3, 2),
            **{name: values[1] for name, values in CHOICES.items()},
        ),
    }
    return cases


CASES = option_cases()


@pytest.mark.parametrize("name", CASES)
def test_formula_equals_the_second_witness_and_balls_hold_it(name: str) -> None:
    case = CASES[name]
    truth = witness(case)
    compared = 0
    for block in enclose(case, ar=mp_arithmetic(420)):
        assert block.empty.tolist() == [not truth[*block.key, i]["scores"] for i in block.rows.tolist()]
        for i in block.rows.tolist():
            assert np.flatnonzero(block.visible_keys()[i]).tolist() == list(truth[*block.key, i]["scores"])
        for entry in entries(case, block, truth):
            with mpmath.workdps(DIGITS):
                gap = abs(mpmath.mpf(block.values[entry.part][entry.row, entry.column]) - entry.value)
                assert gap <= entry.doubt, entry
            compared += 1
    assert compared or ("(0, 0)" in name and "excluded" in name)
    for engine in (BallArithmetic(), arb_arithmetic(128), arb_arithmetic(3000)):
        for block in enclose(case, ar=engine):
            assert all(entry.held_by(block) for entry in entries(case, block, truth))
            if engine.name != "ball" and engine.precision == 3000:
                assert np.isfinite(block.part("out").rad[~block.empty]).all()
                assert np.isfinite(block.part("lse").rad[~block.empty]).all()


def test_the_witness_tells_every_choice_from_its_other() -> None:
    for name, values in CHOICES.items():
        one = CASES["all"]
        first, second = (witness(one.with_options(**{name: value})) for value in values)
        if name == "causal_alignment":
            one = CASES["causal window top_left included"]
            first, second = (witness(one.with_options(**{name: value})) for value in values)
        differ = [where for where in first if first[where].get("lse") != second[where].get("lse")]
        assert differ, name


# ---- rows that are undefined, or the same as without the option


def test_sinks_and_slopes_that_are_no_numbers_leave_rows_undefined() -> None:
    base = CASES["sinks"]
    for options in (
        {"sinks": np.array([np.nan, 0.0])},
        {"sinks": np.array([np.inf, 0.0])},
        {"alibi_slopes": np.array([np.nan, 0.0])},
        {"alibi_slopes": np.array([-np.inf, 0.0])},
    ):
        first, second = enclose(base.with_options(**options))
        assert first.undefined.all()
        assert not second.undefined.any()
    # A row that sees nothing reads neither.
    hidden = np.ones((4, 6), dtype=bool)
    hidden[1] = False
    block = enclose(base.with_options(sinks=np.array([np.nan, 0.0]), attn_mask=hidden))[0]
    assert block.undefined.tolist() == [True, False, True, True]


def test_options_that_change_nothing_change_nothing() -> None:
    base = CASES["cap"].without_options("softcap")
    wanted = enclose(base, ar=arb_arithmetic(300))[0]
    for options in (
        {"sinks": np.full(2, -np.inf)},
        {"window_size": (-1, -1)},
        {"window_size": (50, 50)},
        {"alibi_slopes": np.zeros(2)},
        {"lse_sink": "excluded"},
    ):
        found = enclose(base.with_options(**options), ar=arb_arithmetic(300))[0]
        for part in ("out", "lse"):
            one, two = wanted.part(part), found.part(part)
            assert (one.distance(two.hi) <= 2.0**-50 * np.abs(one.hi)).all()


def test_alibi_by_index_moves_l_by_slope_times_position_and_leaves_o() -> None:
    base = case_of(np.random.default_rng(2), (1, 1, 1, 4, 7, 3, 2), is_causal=True, causal_alignment="bottom_right")
    given = base.with_options(alibi_slopes=np.array([0.375]))
    one, two = (enclose(given.with_options(alibi_bias=b), ar=arb_arithmetic(300))[0] for b in ("distance", "key_index"))
    assert (one.part("out").distance(two.part("out").hi) < 1e-15).all()
    moved = two.part("lse").hi - one.part("lse").hi
    assert np.allclose(moved[:, 0], 0.375 * (np.arange(4) + 3), rtol=0, atol=1e-13)


def test_a_sink_scales_o_by_a_sigmoid() -> None:
    given = CASES["sinks"]
    whole, bare = (enclose(c, ar=arb_arithmetic(300))[0] for c in (given, given.without_options("sinks")))
    share = 1 / (1 + np.exp(0.7 - bare.part("lse").hi))
    assert np.allclose(whole.part("out").hi, bare.part("out").hi * share, rtol=1e-14)
    left_out = enclose(given.with_options(lse_sink="excluded"), ar=arb_arithmetic(300))[0]
    assert (left_out.part("lse").distance(bare.part("lse").hi) < 1e-15).all()


def test_blocks_with_options_are_refined_and_cut_like_others() -> None:
    case = CASES["all"].with_options(lse_sink="excluded")
    block = enclose(case)[0]
    fine = refine(case, block, np.arange(5) == 2, 256)
    truth = witness(case)
    assert all(entry.held_by(fine) for entry in entries(case, fine, truth))
    piece = fine.between(1, 3)
    for name in ("scores", "uncapped", "sink", "lse", "whole_lse", "out", "shift", "total"):
        assert fine.part(name).rad[2].max() < 1e-30 or name in ("sink", "shift")
        assert (piece.part(name).hi == fine.part(name).hi[1:3]).all()


# ---- other orders


@pytest.mark.parametrize("cap_last", [False, True])
@pytest.mark.parametrize("sink", [0.5, 30.0, -40.0])
def test_orders_are_one_function_to_the_last_digits(sink: float, cap_last: bool) -> None:
    rng = np.random.default_rng(8)
    sq, sk, d = 3, 11, 4
    ar = mp_arithmetic(300)
    values = [ar.const(rng.standard_normal(s)) for s in ((sq, d), (sk, d), (sk, 2))]
    visible = rng.random((sq, sk)) < 0.7
    visible[:, 0] = True
    visible[0, : sk // 2] = False
    visible[0, -1] = True
    bias = ar.const(rng.standard_normal((sq, sk)) * 5)
    scoring = attention.Scoring(attention.default_scale(ar, d), bias, ar.const(np.array([[3.0]])), cap_last)
    more: dict[str, Any] = {"scoring": scoring, "visible": visible, "sink": ar.const(np.array([[sink]]))}
    plain = attention.attention(ar, *values, **more)
    first = attention.attention(ar, *values, normalise_first=True, **more)
    orders = {"normalised": (first.out, first.lse)}
    for count in (1, 2, 3, sk, sk + 3):
        orders[f"tile {count}"] = attention.attention_tiled(ar, *values, tile=count, **more)
        orders[f"{count} splits"] = attention.attention_split(ar, *values, splits=count, **more)
    for name, (out, lse) in orders.items():
        for got, wanted in ((out, plain.out), (lse, plain.lse)):
            assert max(abs(float(gap)) for gap in (got - wanted).ravel()) < 1e-86, name
    # A sink that every split counts is seen.
    parts = [
        attention.attention(ar, values[0], ar.rows(values[1], a, b), ar.rows(values[2], a, b),
                            scoring=scoring.of_keys(ar, a, b), visible=visible[:, a:b], sink=more["sink"])
        for a, b in ((0, 6), (6, sk))
    ]  # fmt: skip
    seen = [visible[:, a:b].any(axis=1, keepdims=True) for a, b in ((0, 6), (6, sk))]
    twice = attention.merge(ar, [(s, p.out, p.lse) for s, p in zip(seen, parts, strict=True)])
    assert max(abs(float(gap)) for gap in (twice[1] - plain.lse).ravel()) > 1e-80


# ---- many random heads


def drawn(rng: np.random.Generator, index: int) -> Case:
    """One random case with random options of random sizes."""
    sq, sk = int(rng.integers(1, 4)), int(rng.choice([1, 2, 5, 24]))
    d = int(rng.choice([1, 3, 16]))
    case = case_of(rng, (1, 1, 1, sq, sk, d, 2))
    factors = {n: float(rng.choice([1e-150, 1e-3, 1.0, 1.0, 30.0, 1e4])) for n in "qkv"}
    case = case.with_arrays(**{n: a * factors[n] for n, a in case.arrays.items()})
    options: dict[str, Any] = {name: str(rng.choice(values)) for name, values in CHOICES.items()}
    if index % 2:
        options["softcap"] = float(rng.choice([1e-300, 1e-3, 0.5, 5.0, 50.0, 1e5, 1e300]))
    if index % 3:
        options["sinks"] = np.array([float(rng.choice([-1e9, -30.0, 0.0, 1.0, 8.0, 700.0, 1e4, -np.inf]))])
    if index % 5 < 2:
        options["alibi_slopes"] = np.array([float(rng.choice([0.0, 1e-3, 0.5, 1 / 3, 100.0, 1e200]))])
    if index % 7 < 3:
        lowest = rng.choice([-1e30, -3.4e38, -65504.0, -np.inf])
        options["attn_mask"] = np.where(rng.random((sq, sk)) < 0.3, lowest, rng.standard_normal((sq, sk)))
    if index % 11 < 4:
        options["window_size"] = (int(rng.integers(-1, 6)), int(rng.integers(-1, 6)))
        options["is_causal"] = bool(rng.random() < 0.5)
    return case.with_options(**options)


def escapes(seed: int, count: int, *, shrink: float = 1.0) -> tuple[int, int, int]:
    """(certain escapes from the ball, entries decided, entries) over ``count`` random cases, against arb."""
    rng = np.random.default_rng(seed)
    exact = arb_arithmetic(600)
    out = decided = tried = 0
    for index in range(count):
        case = drawn(rng, index)
        coarse = enclose(case)[0]
        fine = enclose(case, ar=exact)[0]
        for name in ("scores", "lse", "out"):
            part = coarse.part(name)
            for i in np.ndindex(part.hi.shape):
                if coarse.empty[i[0]] or (name == "scores" and not coarse.visible_keys()[i]):
                    continue
                tried += 1
                radius = float(part.rad[i]) * shrink
                if not np.isfinite(radius):
                    continue
                decided += 1
                gap = abs(fine.values[name][i] - flint.arb(float(part.hi[i])))
                out += not gap.is_finite() or bool(gap.lower() > flint.arb(radius))
    return out, decided, tried


def test_balls_hold_arb_with_random_options() -> None:
    out, decided, tried = escapes(3, 400)
    assert out == 0
    assert tried > 7000
    assert decided > 0.8 * tried
    assert escapes(3, 60, shrink=2.0**-9)[0] > 0


@pytest.mark.deep
def test_balls_hold_arb_with_random_options_in_a_long_run() -> None:
    assert escapes(4, 20_000)[0] == 0


# ---- the model kernel


@pytest.mark.parametrize("preset", ["fp64", "fp32", "flash", "eager"])
def test_the_model_kernel_follows_the_options(preset: str) -> None:
    fmt = "fp64" if preset == "fp64" else "fp32"
    rng = np.random.default_rng(1)
    base = case_of(rng, (1, 2, 1, 6, 9, 4, 3), dtype=fmt, is_causal=True)
    for options in (
        {"softcap": 2.0},
        {"softcap": 2.0, "attn_mask": rng.standard_normal((6, 9)).astype(np.float32), "softcap_order": "after_mask"},
        {"alibi_slopes": np.array([0.5, 0.25])},
        {"sinks": np.array([1.0, -1.0])},
        {"sinks": np.array([1.0, -1.0]), "lse_sink": "excluded"},
        {"window_size": (2, 0)},
    ):
        case = base.with_options(**options)
        for form in declared_forms("attention", {"preset": preset, "shifted": "input"}, fmt):
            for tile in (None, 2):
                for block in enclose(case, ar=arb_arithmetic(200)):
                    got = attention_case.model(case, block.key, block.rows, form.with_fields(tile=tile))
                    for name in ("out", "lse"):
                        error = block.part(name).distance(got[name]).max()
                        assert 0 < error < (1e-14 if fmt == "fp64" else 5e-6), (options, form.label)


# ---- refusals, files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": (1, 2, 3)}, r"two integers \(left, right\), got \(1, 2, 3\)"),
        ({"window_size": 4}, "two integers .* got 4"),
        ({"window_size": (1.0, 2)}, r"two integers .* got \(1.0, 2\)"),
        ({"window_size": (True, 2)}, r"two integers .* got \(True, 2\)"),
        ({"window_size": "ab"}, "two integers .* got 'ab'"),
        ({"window_size": (-2, 0)}, r"window_size \(-2, 0\) is negative; -1 means unbounded"),
        ({"softcap": 0.0}, "softcap must be a positive number, got 0.0"),
        ({"softcap": -3.0}, "softcap must be a positive number, got -3.0"),
        ({"softcap": float("nan")}, "softcap must be a positive number, got nan"),
        ({"softcap": float("inf")}, "softcap must be a positive number, got inf"),
        ({"softcap": True}, "softcap must be a positive number, got True"),
        ({"softcap": "50"}, "softcap must be a positive number, got '50'"),
        ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"scale": "1"}, "scale must be a finite number, got '1'"),
        ({"sinks": np.zeros(3)}, r"sinks must be an array \[Hq\] = \[2\], got shape \[3\]"),
        ({"sinks": np.zeros((1, 2))}, r"sinks must be an array \[Hq\] = \[2\], got shape \[1, 2\]"),
        ({"sinks": [0.0, 0.0]}, r"sinks must be an array .* got \[0.0, 0.0\]"),
        ({"alibi_slopes": np.zeros(3)}, r"alibi_slopes must be an array \[2\] or \[1, 2\], got shape \[3\]"),
        ({"alibi_slopes": np.zeros((2, 1))}, r"alibi_slopes must be an array .* got shape \[2, 1\]"),
        ({"alibi_slopes": 0.5}, "alibi_slopes must be an array .* got 0.5"),
        ({"window_left": "open"}, "unknown window_left 'open'; known: included, excluded"),
        ({"softcap_order": "last"}, "unknown softcap_order 'last'; known: before_mask, after_mask"),
        ({"alibi_bias": "key"}, "unknown alibi_bias 'key'; known: distance, key_index"),
        ({"lse_sink": True}, "unknown lse_sink True; known: included, excluded"),
        ({"causal_alignment": None}, "unknown causal_alignment None; known: top_left, bottom_right"),
        ({"sink": np.zeros(2)}, "unknown option 'sink'; known: scale, "),
    ],
)
def test_wrong_options_are_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    base = CASES["cap"].without_options("softcap")
    with pytest.raises(ValueError, match=message):
        enclose(base.with_options(**options))


def test_a_case_with_every_option_survives_its_file(tmp_path: Any) -> None:
    case = CASES["all, the other meanings"]
    save_case(case, tmp_path / "all")
    again = load_case(tmp_path / "all")
    assert again.digest() == case.digest()
    one, two = enclose(case)[0], enclose(again)[0]
    assert (one.part("out").hi == two.part("out").hi).all()
    assert (one.part("lse").hi == two.part("lse").hi).all()
