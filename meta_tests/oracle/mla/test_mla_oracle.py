"""mla: the formula against a second witness, its two forms against each other, enclosures, cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.mla_inputs import FAMILIES, OP, draw, enclosed
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.bounds.mla import output as bounds_mla
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS
from oracle.ops.contracts import preset_forms
from oracle.ops.mla import case as mla_case
from oracle.ops.mla import formula as mla


def witness(
    case: Case, b: int, h: int, i: int, digits: int = 60
) -> tuple[list[mpmath.mpf], list[mpmath.mpf], mpmath.mpf]:
    """(visible scores, O, L) of one row by plain loops over the definition; mpmath needs no shift."""
    with mpmath.workdps(digits):
        a = {name: array.astype(np.float64).tolist() for name, array in case.arrays.items()}
        d_h, d_r, d_c = len(a["w_uk"][0]), len(a["k_pe"][0][0]), len(a["c_kv"][0][0])
        queries, keys = len(a["q_nope"][0][0]), len(a["c_kv"][0])
        given = case.options.get("scale")
        scale = 1 / mpmath.sqrt(d_h + d_r) if given is None else mpmath.mpf(given)
        last = keys - 1
        if case.options.get("is_causal"):
            last = i + (keys - queries if case.options["causal_alignment"] == "bottom_right" else 0)
        scores, values = [], []
        for j in range(keys):
            if j > last:
                continue
            latent = [mpmath.mpf(x) for x in a["c_kv"][b][j]]
            score = mpmath.mpf(0)
            for d in range(d_h):
                up = sum(mpmath.mpf(a["w_uk"][h][d][c]) * latent[c] for c in range(d_c))
                score += mpmath.mpf(a["q_nope"][b][h][i][d]) * up
            for d in range(d_r):
                score += mpmath.mpf(a["q_pe"][b][h][i][d]) * mpmath.mpf(a["k_pe"][b][j][d])
            scores.append(scale * score)
            values.append([sum(mpmath.mpf(w) * x for w, x in zip(row, latent, strict=True)) for row in a["w_uv"][h]])
        total = mpmath.fsum(mpmath.exp(s) for s in scores)
        columns = range(len(a["w_uv"][h]))
        if not scores:
            return [], [mpmath.nan for _ in columns], mpmath.ninf
        out = [mpmath.fsum(mpmath.exp(s) * v[c] for s, v in zip(scores, values, strict=True)) / total for c in columns]
        return scores, out, mpmath.log(total)


def outside(block: Block, name: str, row: int, exact: list[mpmath.mpf], columns: Any = None) -> list[int]:
    """Columns (of those that ``exact`` speaks of) of one row whose interval does not hold the exact value."""
    part = block.part(name)
    index = range(len(exact)) if columns is None else columns
    with mpmath.workdps(60):
        # The witness has 60 digits and no radius of its own; an interval may be a single point.
        return [
            int(c)
            for c, value in zip(index, exact, strict=True)
            if abs(mpmath.mpf(part.hi[row, c]) + mpmath.mpf(part.lo[row, c]) - value)
            > part.rad[row, c] + abs(value) * mpmath.mpf(10) ** -52
        ]


def small_cases() -> Iterator[Case]:
    rng = np.random.default_rng(11)
    for family in FAMILIES:
        for fmt in ("fp64", "fp32", "fp16", "bf16"):
            yield draw(rng, fmt, family)
    # More queries than keys at the bottom right: empty rows come first. One key. One of everything.
    edge = draw(rng, "fp32", "normal", (6, 3, 4, 2, 3, 2))
    for alignment in ("top_left", "bottom_right"):
        yield edge.with_options(is_causal=True, causal_alignment=alignment)
    yield draw(rng, "bf16", "normal", (3, 1, 4, 2, 3, 2))
    yield draw(rng, "fp16", "normal", (1, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("form", mla.FORMS)
@pytest.mark.parametrize("engine", ["arb", "ball"])
def test_enclosures_hold_what_plain_loops_compute(engine: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "form_for", lambda *_, **__: form)
    checked = 0
    for case in small_cases():
        block = enclosed(case, arb_arithmetic(128) if engine == "arb" else None)
        for row in range(len(block.rows)):
            scores, out, lse = witness(case, 0, 0, row)
            assert block.empty[row] == (not scores)
            if not scores:
                continue
            seen = np.flatnonzero(block.visible_keys()[row])
            assert not outside(block, "scores", row, scores, seen), case.describe()
            assert not outside(block, "out", row, out), case.describe()
            assert not outside(block, "lse", row, [lse]), case.describe()
            checked += len(scores) + len(out) + 1
    assert checked > 2000


def test_enclosure_check_can_fail() -> None:
    case = draw(np.random.default_rng(1), "fp32", "normal", (2, 5, 4, 2, 3, 2))
    block = enclosed(case.with_options(scale=1 / np.sqrt(4)))
    _, out, lse = witness(case, 0, 0, 1)
    assert outside(block, "out", 1, out) == [0, 1]
    assert outside(block, "lse", 1, [lse]) == [0]


@pytest.mark.parametrize("form", mla.FORMS)
def test_balls_hold_arb_on_larger_cases(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "form_for", lambda *_, **__: form)
    rng, checked = np.random.default_rng(2), 0
    for family in FAMILIES:
        case = draw(rng, "bf16", family, (9, 40, 16, 8, 24, 12))
        coarse, fine = enclosed(case), enclosed(case, arb_arithmetic(128))
        for name, visible in (("scores", fine.visible_keys()), ("out", True), ("lse", True)):
            wide, narrow = coarse.part(name), fine.part(name)
            # The arb interval, 2^-100 wide, is a point here; float64 subtraction of neighbours is exact.
            miss = np.abs((narrow.hi - wide.hi) + narrow.lo) > wide.rad + narrow.rad
            assert not (miss & visible & ~fine.empty[:, None]).any(), (family, name)
            # Relative to the exponents, whose absolute error is what weights inherit: an interval that holds
            # all proves nothing.
            largest = 1 + np.abs(narrow.hi if name == "scores" else fine.part("scores").hi).max()
            slack = 1e-12 if form == "materialised" else 1e-9
            assert np.median(wide.rad) < slack * largest * (1 + np.abs(wide.hi).max()), (family, name)
            checked += miss.size
    assert checked > 5000


def test_absorbed_is_materialised_to_the_last_digits() -> None:
    rng, ar = np.random.default_rng(3), mp_arithmetic(200)
    for family in FAMILIES:
        case = draw(rng, "fp32", family)
        inputs = mla_case.head(case, (0, 0), np.arange(OP.row_count(case)))
        some = inputs.visible.any(axis=1)
        values = [ar.const(a) for a in inputs.arrays()]
        one, other = (
            mla.mla(
                ar,
                *values,
                scale=mla_case.scale_value(ar, case),
                visible=inputs.visible | ~some[:, None],
                form=form,
            )
            for form in mla.FORMS
        )
        size = [max(abs(x) for x in part.flat) + 1 for part in (one.out, one.lse)]
        envelope = float(np.abs(inputs.c_kv).max() * np.abs(inputs.w_uv).sum(axis=1).max()) + 1
        gap = [max(abs(x) for x in (a - b).flat) for a, b in ((one.out, other.out), (one.lse, other.lse))]
        amplified = 1 + float(max(abs(s) for s in one.scores.flat))
        assert gap[0] <= 2.0**-185 * envelope * amplified * len(inputs.c_kv)
        assert gap[1] <= 2.0**-185 * size[1] * amplified


def test_rows_and_heads_are_independent() -> None:
    rng = np.random.default_rng(4)
    one = draw(rng, "fp32", "normal", (7, 9, 4, 2, 5, 3)).with_options(is_causal=True, causal_alignment="top_left")
    arrays = {n: rng.standard_normal((2, 3, *one.arrays[n].shape[2:])).astype(np.float32) for n in ("q_nope", "q_pe")}
    arrays |= {n: rng.standard_normal((2, *one.arrays[n].shape[1:])).astype(np.float32) for n in ("c_kv", "k_pe")}
    arrays |= {n: rng.standard_normal((3, *one.arrays[n].shape[1:])).astype(np.float32) for n in ("w_uk", "w_uv")}
    case = one.with_arrays(**arrays)
    assert OP.blocks(case) == [(b, h) for b in range(2) for h in range(3)]
    assert OP.output_shapes(case) == {"out": (2, 3, 7, 3), "lse": (2, 3, 7)}
    for key in OP.blocks(case):
        block = enclosed(case, key=key, rows=[5, 2])
        for position, row in enumerate((5, 2)):
            _, out, lse = witness(case, *key, row)
            assert not outside(block, "out", position, out)
            assert not outside(block, "lse", position, [lse])


def test_few_rows_take_the_absorbed_form_and_all_rows_of_a_short_case_the_other() -> None:
    v3 = {"head": 128, "rope": 64, "value": 128, "latent": 512}
    assert mla.form_for(4, 4096, **v3) == "absorbed"
    assert mla.form_for(4096, 4096, **v3) == "materialised"


def test_real_dimensions_are_feasible() -> None:
    d = mla.DEEPSEEK_V3
    case = draw(np.random.default_rng(5), "bf16", "normal", (8, 1024, d.head, d.rope, d.latent, d.value))
    block = enclosed(case, rows=[0, 7])
    fine = enclosed(case, arb_arithmetic(128), rows=[7])
    assert block.part("out").rad.max() < 1e-8
    assert abs(fine.part("out").hi[0] - block.part("out").hi[1]).max() <= block.part("out").rad[1].max()
    (bounded,) = bounds_mla.bounds(case, block, preset_forms("mla", "flash")[:1], {"out": FORMATS["bf16"]})
    assert 0 < bounded["out"].bound.max() < 0.05


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k_pe", (1, 5), "k_pe must be"),
        ("k_pe", (1, 6, 2), "k_pe has Sk = 6, but c_kv has Sk = 5"),
        ("k_pe", (1, 5, 3), "k_pe has d_r = 3, but q_pe has d_r = 2"),
        ("w_uk", (2, 4, 3), "w_uk has H = 2"),
        ("w_uv", (1, 2, 4), "w_uv has d_c = 4, but c_kv has d_c = 3"),
    ],
)
def test_a_misfit_is_named(name: str, shape: tuple[int, ...], message: str) -> None:
    case = draw(np.random.default_rng(6), "fp32", "normal", (3, 5, 4, 2, 3, 2))
    mla_case.check(case)
    with pytest.raises(ValueError, match=message):
        OP.blocks(case.with_arrays(**{name: np.zeros(shape, np.float32)}))
    for option, value in (("window", 3), ("causal_alignment", "middle")):
        with pytest.raises(ValueError, match=f"unknown (option )?'?{option}"):
            OP.blocks(case.with_options(**{option: value}))


def test_rows_that_read_nan_or_infinity_are_undefined_and_no_others() -> None:
    case = draw(np.random.default_rng(7), "fp32", "normal", (4, 4, 3, 2, 3, 2))
    case = case.with_options(is_causal=True, causal_alignment="top_left")
    latent, rotary, query, weight = (case.arrays[n].copy() for n in ("c_kv", "k_pe", "q_pe", "w_uv"))
    latent[0, 2, 1], rotary[0, 3, 0], query[0, 0, 1, 0], weight[0, 1, 2] = np.nan, np.inf, np.nan, -np.inf
    for arrays, expected in (
        ({"c_kv": latent}, [0, 0, 1, 1]),
        ({"k_pe": rotary}, [0, 0, 0, 1]),
        ({"q_pe": query}, [0, 1, 0, 0]),
        ({"w_uv": weight}, [1, 1, 1, 1]),
    ):
        block = enclosed(case.with_arrays(**arrays))
        assert block.undefined.tolist() == [bool(x) for x in expected]
        assert np.isfinite(block.part("out").hi[~block.undefined]).all()
        _, out, _ = witness(case, 0, 0, 0)
        assert block.undefined[0] or not outside(block, "out", 0, out)


def test_refined_rows_are_narrower_and_stay_inside() -> None:
    case = draw(np.random.default_rng(16), "fp32", "outlier", (5, 12, 4, 2, 6, 3))
    (block,) = enclose(case.with_options(is_causal=False))
    fine = refine(case.with_options(is_causal=False), block, np.arange(5) == 2, 256)
    for name in ("out", "lse", "scores"):
        coarse, narrow = block.part(name), fine.part(name)
        assert (narrow.rad[2] < 2.0**-100).all()
        assert np.array_equal(narrow.rad[[0, 1, 3, 4]], coarse.rad[[0, 1, 3, 4]])
        assert (np.abs((narrow.hi - coarse.hi) + narrow.lo)[2] <= coarse.rad[2]).all()
