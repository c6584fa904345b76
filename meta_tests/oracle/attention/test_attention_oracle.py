"""Attention: other evaluation orders, special values, sampled rows, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.oracle.attention.heads import EDGES
from meta_tests.witnesses.attention import case_of, entries, witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.case import Case
from oracle.evaluate import PRECISIONS, enclose, refine
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import formula as attention
from oracle.ops.attention.formula import Scoring


@pytest.mark.parametrize("sizes", [(3, 11, 4), (2, 16, 1), (4, 7, 3)], ids=str)
def test_tiled_split_and_plain_are_one_function_to_the_last_digits(sizes: tuple[int, int, int]) -> None:
    sq, sk, d = sizes
    rng = np.random.default_rng(sum(sizes))
    ar = mp_arithmetic(300)
    q, k, v = (rng.standard_normal(s) for s in ((sq, d), (sk, d), (sk, 2)))
    visible = rng.random((sq, sk)) < 0.7
    visible[:, 0] = True
    visible[0, : sk // 2] = False
    visible[0, -1] = True
    bias = rng.standard_normal((sq, sk)) * 5
    values = [ar.const(a) for a in (q, k, v)]
    more: dict[str, Any] = {"scoring": Scoring(attention.default_scale(ar, d), ar.const(bias)), "visible": visible}
    plain = attention.attention(ar, *values, **more)
    first = attention.attention(ar, *values, normalise_first=True, **more)
    orders = {"normalised": (first.out, first.lse)}
    for tile in (1, 2, 3, sk, sk + 5):
        orders[f"tile {tile}"] = attention.attention_tiled(ar, *values, tile=tile, **more)
    for splits in (1, 2, 3, sk, sk + 2):
        orders[f"{splits} splits"] = attention.attention_split(ar, *values, splits=splits, **more)
    for name, (out, lse) in orders.items():
        for got, wanted in ((out, plain.out), (lse, plain.lse)):
            worst = max(abs(float(gap)) for gap in (got - wanted).ravel())
            # 300 bits are 90 digits.
            assert worst < 1e-86, name
    # The same comparison sees a change in the last digits that float64 could never show.
    nudged = attention.attention_tiled(
        ar,
        *values,
        tile=2,
        scoring=replace(more["scoring"], bias=ar.add(more["scoring"].bias, ar.rational(1, 10**84))),
        visible=visible,
    )
    assert max(abs(float(gap)) for gap in (nudged[1] - plain.lse).ravel()) > 1e-86


def test_default_scale_is_the_real_number() -> None:
    rng = np.random.default_rng(4)
    for d in (1, 2, 3, 64, 80, 96, 128, 256):
        case = case_of(rng, (1, 1, 1, 2, 3, d, 1))
        fine = enclose(case, ar=arb_arithmetic(256))[0].values["scores"]
        rounded = case.with_options(scale=float(1 / np.sqrt(d)))
        other = enclose(rounded, ar=arb_arithmetic(256))[0].values["scores"]
        exact = float(1 / np.sqrt(d)) ** 2 * d == 1.0 and d in (1, 64, 256)
        for i in np.ndindex(fine.shape):
            assert bool(fine[i].overlaps(other[i])) == exact, f"D = {d}"


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("sq", "sk"), [(4, 4), (2, 5), (5, 2), (1, 7)])
def test_causal_alignment_is_what_it_says(alignment: str, sq: int, sk: int) -> None:
    case = case_of(np.random.default_rng(6), (1, 1, 1, sq, sk, 2, 1), is_causal=True, causal_alignment=alignment)
    block = enclose(case)[0]
    for i in range(sq):
        for j in range(sk):
            allowed = j <= i if alignment == "top_left" else (sk - 1 - j) >= (sq - 1 - i)
            assert block.visible_keys()[i, j] == allowed
    assert (block.empty == ~block.visible_keys().any(axis=1)).all()


def test_content_of_hidden_keys_never_matters() -> None:
    rng = np.random.default_rng(7)
    base = case_of(rng, (1, 1, 1, 3, 6, 4, 2), dtype="fp32")
    mask = np.ones((1, 1, 3, 6), dtype=bool)
    mask[..., [1, 4]] = False
    additive = np.where(mask, 0.25, -np.inf).astype(np.float32)
    for option in (mask, additive):
        clean = enclose(base.with_options(attn_mask=option))[0]
        for spoiler in (np.nan, np.inf, -np.inf, 3e38):
            k, v = base.arrays["k"].copy(), base.arrays["v"].copy()
            k[:, :, 1], v[:, :, 4] = spoiler, spoiler
            spoiled = enclose(base.with_arrays(k=k, v=v).with_options(attn_mask=option))[0]
            assert not spoiled.undefined.any()
            for part in ("out", "lse"):
                one, two = clean.part(part), spoiled.part(part)
                assert (np.abs(one.hi - two.hi) <= one.rad + two.rad).all()
                assert (two.rad < 1e-10).all() or spoiler == 3e38
    k = base.arrays["k"].copy()
    k[:, :, 2] = np.nan
    assert enclose(base.with_arrays(k=k).with_options(attn_mask=mask))[0].undefined.all()


def test_rows_that_read_nan_or_inf_are_undefined_and_no_others() -> None:
    base = case_of(np.random.default_rng(8), (1, 1, 1, 4, 4, 3, 2), is_causal=True)
    v, q = base.arrays["v"].copy(), base.arrays["q"].copy()
    v[0, 0, 2, 0] = np.inf
    assert enclose(base.with_arrays(v=v))[0].undefined.tolist() == [False, False, True, True]
    q[0, 0, 1, 0] = np.nan
    assert enclose(base.with_arrays(q=q))[0].undefined.tolist() == [False, True, False, False]
    bias = np.zeros((1, 1, 4, 4))
    bias[0, 0, 3, 1], bias[0, 0, 0, 3] = np.inf, np.nan
    assert enclose(base.with_options(attn_mask=bias))[0].undefined.tolist() == [False, False, False, True]


def test_masks_broadcast_over_batch_heads_and_rows() -> None:
    rng = np.random.default_rng(9)
    case = case_of(rng, (2, 2, 1, 3, 4, 2, 1))
    for shape in ((4,), (3, 4), (1, 1, 1, 4), (2, 1, 3, 4), (1, 2, 3, 1)):
        mask = rng.random(shape) < 0.5
        whole = np.broadcast_to(mask, (2, 2, 3, 4))
        for block in enclose(case.with_options(attn_mask=mask)):
            assert (block.visible_keys() == whole[block.key]).all()


def test_sampled_rows_equal_the_full_evaluation() -> None:
    rng = np.random.default_rng(10)
    case = case_of(rng, (1, 2, 1, 40, 50, 8, 3), dtype="bf16", is_causal=True)
    chosen = np.array([39, 0, 7, 22], dtype=np.int64)
    for ar in (BallArithmetic(), arb_arithmetic(128)):
        for whole, part in zip(enclose(case, ar=ar), enclose(case, rows=chosen, ar=ar), strict=True):
            assert (part.rows == chosen).all()
            assert (part.visible_keys() == whole.visible_keys()[chosen]).all()
            for name in ("scores", "total", "out", "lse"):
                one, two = whole.part(name).rows(chosen), part.part(name)
                gap = np.abs((one.hi - two.hi) + (one.lo - two.lo))
                seen = part.visible_keys() if name == "scores" else np.ones(gap.shape, dtype=bool)
                assert (gap <= (one.rad + two.rad) * 1.001 + 1e-30)[seen].all()
                assert (two.rad <= one.rad * 4 + 1e-30).all()
    by_block = enclose(case, rows={(0, 0): chosen[:1]}, blocks=[(0, 0), (0, 1)])
    assert [len(block.rows) for block in by_block] == [1, 40]


def test_a_block_can_be_cut_into_runs_of_rows() -> None:
    case = case_of(np.random.default_rng(12), (1, 1, 1, 9, 6, 4, 2), is_causal=True)
    block = refine(case, enclose(case)[0], np.arange(9) == 4, 256)
    for start, stop in ((0, 9), (3, 6), (8, 9)):
        piece = block.between(start, stop)
        assert (piece.visible_keys() == block.visible_keys()[start:stop]).all()
        assert (piece.rows == block.rows[start:stop]).all()
        assert (piece.empty == block.empty[start:stop]).all()
        for name in ("scores", "shift", "total", "out", "lse"):
            one, two = block.part(name), piece.part(name)
            assert (one.hi[start:stop] == two.hi).all()
            assert (one.rad[start:stop] == two.rad).all()


def test_refining_replaces_the_marked_rows_alone() -> None:
    case = EDGES["common offset"]
    block = enclose(case)[0]
    assert block.part("out").rad.max() > 1e-9
    marked = np.array([True, False, True])
    fine = refine(case, block, marked, 256)
    for name in ("out", "lse", "scores", "total", "shift"):
        before, after = block.part(name), fine.part(name)
        assert (after.hi[1] == before.hi[1]).all()
        assert (after.rad[1] == before.rad[1]).all()
        # hi + lo holds some 106 bits, the low part of the radius is what they leave over.
        assert (after.rad[marked] <= 1e-31 * (1 + after.upper_abs()[marked])).all()
    exact = witness(case)
    assert all(entry.held_by(fine) for entry in entries(case, fine, exact))
    assert refine(case, block, np.zeros(3, dtype=bool), 256) is block
    again = refine(case, fine, np.array([False, True, False]), 128)
    assert (again.part("out").rad[0] == fine.part("out").rad[0]).all()
    assert again.part("out").rad[1].max() < 1e-20


def test_undecided_at_the_cap_by_construction() -> None:
    # Two scores near 2^1990 that differ by an irrational part of their last digits: 1024 bits cannot say by how much,
    # so that the weights, and with them O, stay unknown at every precision of the ladder.
    q = np.array([2.0**1000, 2.0**1000]).reshape(1, 1, 1, 2)
    k = np.array([[2.0**990, 0.0], [0.0, 2.0**990]]).reshape(1, 1, 2, 2)
    v = np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    case = Case("attention", {"q": q, "k": k, "v": v})
    block = enclose(case)[0]
    for precision in (None, *PRECISIONS):
        if precision is not None:
            block = refine(case, block, np.ones(1, dtype=bool), precision)
        assert np.isinf(block.part("out").rad).all()
    # The value exists (the scores are equal, O = 1/2), and enough bits find it.
    assert np.isfinite(refine(case, block, np.ones(1, dtype=bool), 4096).part("out").rad).all()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"q": (1, 2, 3)}, {}, r"q must be \[B, H, S, D\]"),
        ({"k": (1, 1, 5, 3)}, {}, "head dimension: 4 and 3"),
        ({"v": (1, 1, 4, 2)}, {}, "k and v differ"),
        ({"q": (2, 2, 3, 4)}, {}, "differ in batch: 2 and 1"),
        ({"k": (1, 3, 5, 4), "v": (1, 3, 5, 2)}, {}, "2 query heads are no multiple of 3"),
        ({}, {"causal": True}, "unknown option 'causal'"),
        ({}, {"causal_alignment": "middle"}, "unknown causal_alignment 'middle'"),
        ({}, {"attn_mask": np.ones((1, 1, 3, 4), dtype=bool)}, "broadcast"),
    ],
)
def test_wrong_cases_are_refused(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    base = case_of(np.random.default_rng(0), (1, 2, 1, 3, 5, 4, 2))
    wrong = replace(base, arrays={**base.arrays, **{n: np.zeros(s) for n, s in changes.items()}}, options=options)
    with pytest.raises(ValueError, match=message):
        enclose(wrong)


def test_attention_over_no_keys_has_no_value() -> None:
    ar = BallArithmetic()
    empty = [ar.const(np.zeros(s)) for s in ((2, 3), (0, 3), (0, 1))]
    with pytest.raises(ValueError, match="no keys at all"):
        attention.attention_tiled(
            ar, *empty, scoring=Scoring(ar.rational(1, 1)), visible=np.zeros((2, 0), dtype=bool), tile=4
        )


def test_shapes_of_outputs_and_blocks() -> None:
    case = case_of(np.random.default_rng(0), (2, 4, 2, 3, 5, 4, 7))
    assert attention_case.output_shapes(case) == {"out": (2, 4, 3, 7), "lse": (2, 4, 3)}
    assert attention_case.blocks(case) == [(b, h) for b in range(2) for h in range(4)]
