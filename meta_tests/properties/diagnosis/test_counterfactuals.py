"""The tables of counterfactuals: told apart, right on odd shapes, and what their predictions accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.properties.diagnosis.cases import (
    PROFILE,
    case_for,
    subject_of,
)
from oracle.case import Case
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS
from properties.diagnosis.counterfactual import Prediction, failing_case
from properties.diagnosis.engine import fresh_numbers, table_of
from properties.diagnosis.match import match
from properties.subject import subject_for
from targets.calling.registry import resolve
from targets.honest.table import HONEST


@pytest.mark.parametrize("op", ["attention", "mla", "rope", "rope_apply", "softmax", "log_softmax", "logsumexp"])
def test_counterfactuals_of_a_table_are_told_apart(op: str) -> None:
    names = [row.name for row in table_of(op).hypotheses]
    assert len(set(names)) == len(names)
    honest = next(h for h in HONEST if h.op == op)
    subject = subject_of(honest.target, "bf16")
    case = case_for(subject)
    failing = failing_case(subject, case, subject.call(case).outputs)
    for row in table_of(op).hypotheses:
        sentences = [c.sentence for c in row.imagine(failing)]
        assert len(set(sentences)) == len(sentences)
        assert all("{" not in s for s in sentences)


def odd_cases(op: str) -> Iterator[tuple[str, Case]]:
    """(dtype, case) of shapes and options that a table may not have thought of."""
    rng = np.random.default_rng(7)

    def drawn(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
        return {n: FORMATS[dtype].store(rng.standard_normal(s)) for n, s in shapes.items()}

    match op:
        case "attention":
            yield "fp64", Case(op, drawn("fp64", q=(1, 1, 1, 1), k=(1, 1, 1, 1), v=(1, 1, 1, 1)), {"scale": -2.0})
            causal = {"is_causal": True, "causal_alignment": "bottom_right"}
            yield "bf16", Case(op, drawn("bf16", q=(2, 6, 5, 3), k=(2, 2, 2, 3), v=(2, 2, 2, 7)), causal)
            yield "fp16", Case(op, drawn("fp16", q=(1, 2, 3, 65), k=(1, 2, 130, 65), v=(1, 2, 130, 4)), {"scale": 0.0})
            arrays = drawn("fp32", q=(2, 2, 3, 4), k=(2, 1, 40, 4), v=(2, 1, 40, 4))
            yield "fp32", Case(op, arrays, {"attn_mask": rng.random((2, 1, 1, 40)) < 0.2})
            additive = np.where(rng.random((3, 40)) < 0.5, -np.inf, 1.0).astype(np.float32)
            yield (
                "fp32",
                Case(op, arrays, {"attn_mask": additive, "is_causal": True, "causal_alignment": "bottom_right"}),
            )
            arrays["v"][0, 0, 3] = np.nan
            yield "fp32", Case(op, arrays, {"attn_mask": np.arange(40) != 3})
        case "mla":
            for dtype, (b, h, sq, sk), causal in (("fp64", (1, 1, 1, 1), False), ("bf16", (2, 3, 4, 2), True)):
                shapes = {
                    "q_nope": (b, h, sq, 3), "q_pe": (b, h, sq, 2), "c_kv": (b, sk, 5), "k_pe": (b, sk, 2),
                    "w_uk": (h, 3, 5), "w_uv": (h, 7, 5),
                }  # fmt: skip
                options = {"is_causal": True, "causal_alignment": "top_left"} if causal else {}
                yield dtype, Case(op, drawn(dtype, **shapes), options)
        case "rope":
            for dtype, shape, positions, options in (
                ("fp64", (1, 1, 1, 2), np.array([0]), {}),
                (
                    "bf16",
                    (2, 1, 3, 7),
                    np.array([[0, 2**24, 5], [70000, 1, 2]]),
                    {"rotary_dim": 4, "layout": "interleaved"},
                ),
                ("fp16", (1, 2, 2, 6), np.array([3, 4]), {"base": 1.5}),
            ):
                yield dtype, Case(op, {**drawn(dtype, x=shape), "positions": positions}, options)
        case "rope_apply":
            yield "fp32", Case(op, drawn("fp32", x=(1, 1, 1, 3), cos=(1, 1), sin=(1, 1)))
        case _:
            for dtype, shape in (("fp64", (1,)), ("bf16", (2, 1, 3)), ("fp16", (3, 40)), ("fp32", (1, 1, 1))):
                arrays = drawn(dtype, x=shape)
                arrays["x"][..., 0] = -np.inf
                yield dtype, Case(op, arrays)


@pytest.mark.parametrize("op", ["attention", "mla", "rope", "rope_apply", "softmax", "log_softmax", "logsumexp"])
def test_no_counterfactual_stumbles_over_odd_shapes(op: str) -> None:
    tried = 0
    for dtype, case in odd_cases(op):
        honest = next(h for h in HONEST if h.op == op)
        target = replace(resolve(honest.target), contract=None)
        subject = subject_for(target, dtype, profile=PROFILE)
        observed = subject.call(case)
        assert observed.fault is None
        wrong = {n: (v.astype(np.float64) * 3 + 1).astype(v.dtype) for n, v in observed.outputs.items()}
        failing = failing_case(subject, case, wrong)
        for row in table_of(op).hypotheses:
            for c in row.imagine(failing):
                assert match(failing, c, quick=False).fits.shape == (len(subject.forms),)
                tried += 1
        related = [make(subject, case) for _, make in table_of(op).related]
        probes = [*(c for c in related if c is not None), *table_of(op).ranges(case), *table_of(op).wider(case)]
        for other in [*probes, fresh_numbers(case, 0)]:
            assert subject.call(other).fault is None
    assert tried > 10


def test_an_op_without_a_table_has_no_diagnosis() -> None:
    assert table_of("fft").hypotheses == ()


def prediction(value: float, bound: float, **masks: bool) -> Prediction:
    array = np.array([[value]])
    zero = np.zeros((1, 1))
    marked = {n: np.full((1, 1), masks.get(n, False)) for n in ("breaks", "lost", "may_break", "free")}
    return Prediction(Enclosure(array, zero, zero), np.array([[bound]]), **marked)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("p", "fits", "misses"),
    [
        (prediction(1.0, 0.5), [1.0, 1.5, 0.5], [1.51, -1.0, INF, NAN]),
        (prediction(1.0, 0.5, may_break=True), [1.0, INF, -INF, NAN], [2.0]),
        (prediction(1.0, 0.5, breaks=True), [INF, NAN], [1.0, 0.0]),
        (prediction(1.0, 0.5, lost=True), [0.0, INF, NAN], [1.0]),
        (prediction(1.0, 0.5, free=True), [1.0, 99.0, INF, NAN], []),
        (prediction(-INF, 0.0), [-INF], [INF, NAN, 0.0]),
        (prediction(-INF, INF), [-INF], [INF, 0.0]),
        (prediction(1.0, INF), [99.0], [NAN]),
    ],
)
def test_what_a_prediction_accepts(p: Prediction, fits: list[float], misses: list[float]) -> None:
    assert all(p.fits(np.array([[y]]))[0, 0] for y in fits)
    assert not any(p.fits(np.array([[y]]))[0, 0] for y in misses)


def test_scaling_a_prediction_scales_its_room() -> None:
    p = prediction(1.0, 0.5).scaled(-2.0)
    assert p.fits(np.array([[-2.9]]))[0, 0]
    assert not p.fits(np.array([[-3.1]]))[0, 0]
