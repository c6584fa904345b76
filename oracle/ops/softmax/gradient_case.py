"""softmax_backward as a case: y and dy [..., n] in, dx [..., n] out; the whole array is one block, rows flattened.

A row with a NaN or an infinity in y or dy is *undefined*. There are no empty rows: a y of zeros gives zeros.
`gradient_at` is the exact gradient of softmax or log_softmax at x itself, for checks of a whole way forward and back.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.op import Array, Gradient, Op
from oracle.ops.softmax import case as softmax_case
from oracle.ops.softmax import gradient as softmax_backward


def check(case: Case) -> None:
    """ValueError, naming the argument, unless y and dy are rows of floating-point numbers of one shape."""
    y, dy = case.arrays["y"], case.arrays["dy"]
    if y.ndim == 0 or y.shape[-1] == 0:
        raise ValueError(f"y must be [..., n] with n >= 1, got shape {list(y.shape)}")
    if dy.shape != y.shape:
        raise ValueError(f"dy must have the shape of y, {list(y.shape)}, got {list(dy.shape)}")
    for array in (y, dy):
        format_of(array)
    if case.options:
        raise ValueError(f"unknown option {sorted(case.options)[0]!r}; {case.op} has none")


def row_count(case: Case, key: tuple[int, ...] = ()) -> int:
    return prod(case.arrays["y"].shape[:-1])


def clean_rows(case: Case, rows: Rows) -> tuple[Float64Array, Float64Array, NDArray[np.bool_]]:
    """(y, dy, undefined): float64 rows, those with anything non-finite as zeros."""
    y, dy = (
        case.arrays[n].reshape(-1, case.arrays[n].shape[-1])[np.asarray(rows)].astype(np.float64) for n in ("y", "dy")
    )
    undefined = np.asarray(~(np.isfinite(y) & np.isfinite(dy)).all(axis=1))
    lost = undefined[:, None]
    return np.where(lost, 0.0, y), np.where(lost, 0.0, dy), undefined


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    y, dy, undefined = clean_rows(case, rows)
    done = softmax_backward.softmax_backward(ar, ar.const(y), ar.const(dy))
    nothing = np.zeros(len(undefined), dtype=bool)
    return Block(key, rows, ar, {"total": done.total, "dx": done.dx}, nothing, undefined)


def gradient_at(ar: Arithmetic[V], case: Case, dy: Float64Array) -> tuple[Block, softmax_backward.Turned[V]]:
    """The forward block of a softmax or log_softmax case, and D and dx [R, n] at x for the cotangent dy [R, n].

    An entry -inf is held fixed there: its dx is 0, and its dy must be.
    """
    block = softmax_case.evaluate(ar, case, (), np.arange(softmax_case.row_count(case)))
    visible = block.visible_keys()
    given: V = ar.where(visible, ar.const(dy))
    p = block.values["p"]
    turned = (softmax_backward.of_log if case.op == "log_softmax" else softmax_backward.softmax_backward)(ar, p, given)
    return block, softmax_backward.Turned(turned.total, ar.where(visible, turned.dx))


def stages(contract: Contract, fmt: Format) -> dict[str, Format]:
    """Stage name -> format for inputs of ``fmt``: a narrow compute format stores whatever one call passes on."""
    compute = _named(contract.arithmetic.compute, fmt)
    result = dict.fromkeys(("product", "difference", "total"), compute)
    result["output"] = _named(contract.output.stored_as, fmt)
    if contract.sums.row_sum not in ("unrounded", "rounded"):
        result["row_sum"] = _named(contract.sums.row_sum, fmt)
    return result


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """``dx`` of an honest kernel of this contract, its sum sequential."""
    fmt = format_of(case.arrays["y"])
    ar = RoundedArithmetic(_named(contract.arithmetic.compute, fmt), stages(contract, fmt))
    y, dy, _ = clean_rows(case, rows)
    with ar.working():
        return {"dx": ar.to_enclosure(softmax_backward.softmax_backward(ar, ar.const(y), ar.const(dy)).dx)[0]}


def _named(name: str | None, fmt: Format) -> Format:
    return fmt if name is None or name == "input" else FORMATS[name]


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    return [()]


OPS = (
    Op(
        name="softmax_backward",
        family="softmax",
        presets=presets.SOFTMAX_BACKWARD,
        arrays={"y": Array("... n", "distribution"), "dy": Array("... n")},
        results={"dx": "... n"},
        options={},
        gradient=Gradient("softmax", "dy", {"x": "dx"}),
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        output_shapes=lambda case: {"dx": case.arrays["y"].shape},
        model=model,
        width=lambda case, key: int(case.arrays["y"].shape[-1]),
    ),
)
