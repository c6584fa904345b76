"""Counterfactuals of softmax's gradient: the row sum D left out, made of other numbers, or misread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.softmax.gradient_case import clean_rows
from properties.diagnosis import outputs
from properties.diagnosis.counterfactual import (
    Counterfactual,
    FailingCase,
    Hypothesis,
    Key,
    Predictions,
    Table,
    changed,
    of_case,
)
from properties.ops.softmax.diagnosis import other_axes

TILES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Sums = Callable[[Float64Array, Float64Array], Float64Array]


def sums(failing: FailingCase) -> Iterator[Counterfactual]:
    """D as another number of each row."""
    n = failing.case.arrays["y"].shape[-1]
    j = np.arange(n)
    rows: list[tuple[str, Sums]] = [
        ("the row sum D were left out", lambda y, dy: np.zeros((len(y), 1))),
        ("D were divided by the sum of y (normalised again)", _normalised),
        ("D were the sum of dy, not of y dy", lambda y, dy: dy.sum(axis=1, keepdims=True)),
        ("D were the mean of y dy", lambda y, dy: (y * dy).mean(axis=1, keepdims=True)),
        ("D had the wrong sign", lambda y, dy: -(y * dy).sum(axis=1, keepdims=True)),
    ]
    if n > 1:
        rows += [
            ("the last entry were left out of D", _over(j < n - 1)),
            ("the first entry were left out of D", _over(j > 0)),
        ]
    for t in TILES:
        if n > t and n % t > 1:
            rows.append((f"D left out the last {n % t} entries, beyond a multiple of {t}", _over(j < n // t * t)))
    for says, total in rows:
        yield _formula(failing, says, total, lambda y, dy, d: y * (dy - d))
    yield _formula(
        failing,
        "it were the gradient of log_softmax, dy - y times the sum of dy",
        lambda y, dy: dy.sum(axis=1, keepdims=True),
        lambda y, dy, d: dy - y * d,
    )


def _normalised(y: Float64Array, dy: Float64Array) -> Float64Array:
    with np.errstate(all="ignore"):
        return np.asarray((y * dy).sum(axis=1, keepdims=True) / y.sum(axis=1, keepdims=True))


def _over(kept: NDArray[np.bool_]) -> Sums:
    return lambda y, dy: np.where(kept, y * dy, 0.0).sum(axis=1, keepdims=True)


def _formula(
    failing: FailingCase,
    says: str,
    total: Sums,
    gradient: Callable[[Float64Array, Float64Array, Float64Array], Float64Array],
) -> Counterfactual:
    """dx = gradient(y, dy, D) with D = total(y, dy) [r, 1], in float64."""

    def block(key: Key, rows: Rows) -> Block:
        y, dy, undefined = clean_rows(failing.case, rows)
        with np.errstate(all="ignore"):
            d = total(y, dy)
            value = gradient(y, dy, d)
        undefined = undefined | ~np.isfinite(value).all(axis=1)
        ar = BallArithmetic()
        kept = [ar.const(np.where(undefined[:, None], 0.0, a)) for a in (d, value)]
        nothing = np.zeros(len(rows), dtype=bool)
        return Block(key, rows, ar, {"total": kept[0], "dx": kept[1]}, nothing, undefined)

    return Counterfactual(says, block=block)


def cotangents(failing: FailingCase) -> Iterator[Counterfactual]:
    """The formula on other arguments."""
    case = failing.case
    y, dy = case.arrays["y"], case.arrays["dy"]
    yield of_case("dy were all ones", case.with_arrays(dy=np.ones_like(dy)))
    yield of_case("y and dy had changed places", case.with_arrays(y=dy, dy=y))


def rounded_sums(failing: FailingCase) -> Iterator[Counterfactual]:
    """D added up entry by entry in a narrow format."""
    for name in ("fp16", "bf16"):

        def total(y: Float64Array, dy: Float64Array, fmt: Format = FORMATS[name]) -> Float64Array:
            found = np.zeros((len(y), 1))
            for j in range(y.shape[1]):
                found = fmt.round(found + (y * dy)[:, j : j + 1])
            return found

        def change(s: FailingCase, block: Block, p: Predictions, total: Sums = total) -> Predictions:
            y, dy, _ = clean_rows(s.case, block.rows)
            value = y * (dy - total(y, dy))
            lost = ~np.isfinite(value)
            return {s.main: p[s.main].at(np.where(lost, 0.0, value)).marked("free", lost)}

        yield changed(f"D were kept in {name}", change, contract={"row_sum": name})


def wider(case: Case) -> Iterator[Case]:
    """128 entries more a row, and one row more: every remainder by a tile stays what it is."""
    y = case.arrays["y"]
    if y.size > 2**14 or y.ndim == 1:
        return
    rng = np.random.default_rng(8)
    drawn = rng.standard_normal((2, y.shape[0] + 1, *y.shape[1:-1], y.shape[-1] + 128))
    weights = np.exp(drawn[0]) / np.exp(drawn[0]).sum(axis=-1, keepdims=True)
    yield case.with_arrays(y=format_of(y).store(weights), dy=format_of(case.arrays["dy"]).store(drawn[1]))


HYPOTHESES = (
    Hypothesis("sum", sums),
    Hypothesis("axis", other_axes),
    Hypothesis("cotangent", cotangents),
    *outputs.WHOLE,
    Hypothesis("stages", rounded_sums),
    Hypothesis("narrow output", outputs.rounded_output),
)

TABLES = {"softmax_backward": Table(HYPOTHESES, wider=wider)}
