"""Counterfactuals of softmax, log_softmax and logsumexp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block, Rows
from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format, StoredArray, format_of
from oracle.ops.softmax.case import clean_rows, model
from properties.diagnosis import outputs
from properties.diagnosis.counterfactual import (
    Change,
    Counterfactual,
    FailingCase,
    Hypothesis,
    Key,
    Predictions,
    Table,
    changed,
    of_case,
)
from properties.diagnosis.stages import FADES, OVERFLOWS, SAFE, UNDERFLOWS
from properties.subject import LOG2_E

# ln of the smallest number that a format does not round to zero, and of its smallest normal one.
UNDERFLOW = {"fp32": (-104.0, -87.0), "bf16": (-92.9, -87.0), "fp16": (-17.4, -9.6)}


def other_axes(failing: FailingCase) -> Iterator[Counterfactual]:
    """The reduction over another axis, where the output has the shape of the inputs."""
    arrays = failing.case.arrays
    x = next(iter(arrays.values()))
    if failing.case.op == "logsumexp":
        return
    for axis in range(x.ndim - 1):
        moved = np.moveaxis(x, axis, -1)
        others = {name: np.ascontiguousarray(np.moveaxis(a, axis, -1)) for name, a in arrays.items()}
        turned = failing.case.with_arrays(**others)
        every = np.arange(moved.size // moved.shape[-1])

        def source(key: Key, rows: Rows, turned: Case = turned, every: Rows = every) -> tuple[Case, Key, Rows]:
            return turned, key, every

        def arrange(key: Key, rows: Rows, a: StoredArray, shape: Any = moved.shape, axis: int = axis) -> StoredArray:
            return np.moveaxis(a.reshape(shape), -1, axis).reshape(-1, x.shape[-1])[rows]

        yield Counterfactual(f"the reduction ran over axis {axis} instead of the last", source, arrange=arrange)
    if x.ndim > 1:
        flat = failing.case.with_arrays(**{name: a.reshape(1, -1) for name, a in arrays.items()})
        yield Counterfactual(
            "the reduction ran over the whole array",
            lambda key, rows: (flat, key, np.arange(1)),
            arrange=lambda key, rows, a: a.reshape(-1, x.shape[-1])[rows],
        )


def other_logits(failing: FailingCase) -> Iterator[Counterfactual]:
    """Rows of other numbers."""
    x = failing.case.arrays["x"]
    wide = x.astype(np.float64)

    def logits(says: str, values: object) -> Counterfactual:
        return of_case(says, failing.case.with_arrays(x=np.asarray(values)))

    with np.errstate(all="ignore"):
        yield logits("the exponential had base 2", wide / LOG2_E)
        yield logits("the exponential had base 10", wide / np.log10(np.e))
        yield logits("every entry were negated", np.where(np.isfinite(wide), -wide, wide))
        own = format_of(x)
        for name in ("tf32", "fp16", "bf16"):
            if FORMATS[name].precision < own.precision:
                yield logits(f"x were rounded to {name}", FORMATS[name].round(wide).astype(x.dtype))


def left_out(failing: FailingCase) -> Iterator[Counterfactual]:
    """Entries that are missing in the sum, and only there."""
    n = failing.case.arrays["x"].shape[-1]
    if n < 2:
        return
    j = np.arange(n)
    rows: list[tuple[str, NDArray[np.bool_]]] = [
        ("the last entry were left out of the sum", j < n - 1),
        ("the first entry were left out of the sum", j > 0),
    ]
    for t in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if n > t and n % t > 1:
            rows.append((f"the sum left out the last {n % t} entries, beyond a multiple of {t}", j < n // t * t))
    for says, kept in rows:
        yield changed(says, _summed(kept))


def _summed(kept: NDArray[np.bool_]) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        share = np.where(kept, block.part("p").hi, 0.0).sum(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            match s.case.op:
                case "softmax":
                    moved = p["out"].scaled(1 / share)
                case "log_softmax":
                    moved = p["out"].at(p["out"].value.hi - np.log(share))
                case _:
                    moved = p["out"].at(p["out"].value.hi + np.log(share))
        moved = moved.marked("free", share <= 0)
        return {"out": p["out"].where(block.empty[:, None], moved)}

    return change


def ranges_lost(failing: FailingCase) -> Iterator[Counterfactual]:
    """exp(x) without its maximum, and logarithms of what underflowed."""
    op = failing.case.op

    def without(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        x, visible, _, _ = clean_rows(s.case, block.rows)
        top = np.where(visible, x, -np.inf).max(axis=1, keepdims=True)
        lse = block.part("lse").hi
        out, live = p["out"], ~block.empty[:, None]
        # exp(x) / inf is zero, inf / inf is NaN: either is lost.
        over = "lost" if op == "softmax" else "breaks"
        out = out.marked(over, live & (top > OVERFLOWS)).marked(
            "lost" if op == "softmax" else "breaks", live & (lse < UNDERFLOWS)
        )
        unsure = ((lse > SAFE) & (top <= OVERFLOWS)) | ((top < FADES) & (lse >= UNDERFLOWS))
        # A result of finite sums may still have lost its small terms.
        return {"out": out.marked("free", live & unsure)}

    yield changed("exponentials were taken without subtracting a maximum", without)
    if op != "log_softmax":
        return
    for name, (gone, fades) in UNDERFLOW.items():

        def logged(
            s: FailingCase, block: Block, p: Predictions, gone: float = gone, fades: float = fades
        ) -> Predictions:
            log_p = block.part("log_p").hi
            visible = block.visible_keys()
            lost = visible & (log_p < gone)
            return {"out": p["out"].marked("breaks", lost).marked("free", visible & (log_p < fades) & ~lost)}

        yield changed(f"it were the logarithm of a softmax that underflowed in {name}", logged)


def rounded_stages(failing: FailingCase) -> Iterator[Counterfactual]:
    """The row sum, or everything, in a narrow format."""
    own = failing.formats["out"]
    base = failing.subject.forms[0]
    for name in ("fp16", "bf16"):
        form = base.with_fields(compute="fp64", row_sum=name, output="fp64", exponent="natural", from_lse=False)

        def sequential(s: FailingCase, block: Block, p: Predictions, form: Any = form) -> Predictions:
            value = model(s.case, block.key, block.rows, form)["out"]
            return {"out": p["out"].where(block.empty[:, None], p["out"].at(value))}

        yield changed(f"the row sum were kept in {name}", sequential, contract={"row_sum": name})
    if own.precision < 24 and failing.case.op == "softmax":
        for says, one_by_one in (("", False), (", the sum included", True)):
            yield changed(
                f"every stage were rounded to {own.name}{says}", _all_in(own, one_by_one), contract={"compute": "input"}
            )


def _all_in(fmt: Format, one_by_one: bool) -> Change:
    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        x, visible, _, _ = clean_rows(s.case, block.rows)
        top = np.where(visible, x, -np.inf).max(axis=1, keepdims=True)
        e = np.where(visible, fmt.round(np.exp(fmt.round(x - top))), 0.0)
        if one_by_one:
            total = np.zeros((len(e), 1))
            for j in range(e.shape[1]):
                total = fmt.round(total + e[:, j : j + 1])
        else:
            total = fmt.round(e.sum(axis=1, keepdims=True))
        with np.errstate(all="ignore"):
            value: Float64Array = fmt.round(e / total)
        return {"out": p["out"].where(block.empty[:, None], p["out"].at(value))}

    return change


def uniform(failing: FailingCase) -> Iterator[Counterfactual]:
    x = failing.case.arrays["x"]
    flat = np.where(np.isneginf(x.astype(np.float64)), -np.inf, 0.0)
    yield of_case("all entries of a row were equal", failing.case.with_arrays(x=flat.astype(x.dtype)))


def ranges(case: Case) -> Iterator[Case]:
    """Rows far from zero, and rows with entries far below their maximum."""
    x = case.arrays["x"]
    own = format_of(x)
    drawn = np.random.default_rng(6).standard_normal(x.shape)
    for values in (drawn + 150.0, drawn - 150.0, drawn * 40.0, drawn * 8.0):
        yield case.with_arrays(x=own.store(values))


def wider(case: Case) -> Iterator[Case]:
    """128 entries more a row, and one row more: every remainder by a tile stays what it is."""
    x = case.arrays["x"]
    if x.size > 2**14 or x.ndim == 1:
        return
    shape = (x.shape[0] + 1, *x.shape[1:-1], x.shape[-1] + 128)
    yield case.with_arrays(x=format_of(x).store(np.random.default_rng(8).standard_normal(shape)))


HYPOTHESES = (
    Hypothesis("LSE", outputs.log_sum_exps),
    Hypothesis("axis", other_axes),
    Hypothesis("logits", other_logits),
    Hypothesis("sum", left_out),
    Hypothesis("empty rows", outputs.empty_rows),
    Hypothesis("uniform", uniform),
    *outputs.WHOLE,
    Hypothesis("maximum", ranges_lost, ranged=True),
    Hypothesis("stages", rounded_stages),
    Hypothesis("narrow output", outputs.rounded_output),
    Hypothesis("row sums", outputs.off_row_sums),
)

TABLES = {op: Table(HYPOTHESES, (), ranges, wider) for op in ("softmax", "log_softmax", "logsumexp")}
