"""softmax, log_softmax and logsumexp as cases: one array x [..., n], reduced over its last axis.

The whole array is one block (key ``()``): leading axes are flattened to R rows, and row numbers count
those. The output is called ``out``: the shape of x, for logsumexp without the last axis ([R, 1] inside a
block).

Special values: an entry -inf is not visible (weight 0; its log_softmax is -inf, which no enclosure states);
a row of -inf only is *empty*; a row with +inf or NaN is *undefined*. Both kinds are evaluated as rows of
zeros, which mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.op import Array, Op, no_trivial_outputs
from oracle.ops.softmax import formula as softmax
from oracle.vacuity import uniform_rows

RESULTS = {"softmax": "p", "log_softmax": "log_p", "logsumexp": "lse"}
"""Op name -> the field of `oracle.ops.softmax.formula.Normalised` that is its output."""


def check(case: Case) -> None:
    """ValueError, naming the argument, unless x has rows of at least one floating-point number."""
    x = case.arrays["x"]
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., n] with n >= 1, got shape {list(x.shape)}")
    format_of(x)
    if case.options:
        raise ValueError(f"unknown option {sorted(case.options)[0]!r}; {case.op} has none")


def row_count(case: Case, key: tuple[int, ...] = ()) -> int:
    return prod(case.arrays["x"].shape[:-1])


def clean_rows(case: Case, rows: Rows) -> tuple[Float64Array, NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """(x, visible, empty, undefined): float64 rows with every non-finite entry, and every row without a
    value, as zeros.

    Rows without a value count as wholly visible, so that no arithmetic meets a sum of nothing.
    """
    x = case.arrays["x"]
    taken = x.reshape(-1, x.shape[-1])[rows].astype(np.float64)
    if np.isfinite(taken).all():
        nothing = np.zeros(len(rows), dtype=bool)
        return taken, np.ones(taken.shape, dtype=bool), nothing, nothing
    undefined = np.asarray((np.isnan(taken) | np.isposinf(taken)).any(axis=1))
    visible = ~np.isneginf(taken)
    empty = np.asarray(~visible.any(axis=1))
    lost = empty | undefined
    visible |= lost[:, None]
    return np.where(visible & ~lost[:, None], taken, 0.0), visible, empty, undefined


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    """All of m, l, p, ln p and L on ``rows``, the op's own result as ``out``."""
    x, visible, empty, undefined = clean_rows(case, rows)
    done = softmax.normalise(ar, ar.const(x), visible)
    values = {"shift": done.shift, "total": done.total, "p": done.p, "log_p": done.log_p, "lse": done.lse}
    values["out"] = values[RESULTS[case.op]]
    return Block(key, rows, ar, values, empty, undefined, visible)


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """``out`` of an honest kernel of this contract: sequential row sum, output rounded once."""
    fmt = format_of(case.arrays["x"])
    ar = RoundedArithmetic(_named(contract.arithmetic.compute, fmt), stages(contract, fmt))
    x, visible, _, _ = clean_rows(case, rows)
    with ar.working():
        done = softmax.normalise(ar, ar.const(x), visible, from_lse=contract.output.from_lse)
        return {"out": ar.to_enclosure(getattr(done, RESULTS[case.op]))[0]}


def stages(contract: Contract, fmt: Format) -> dict[str, Format]:
    """Stage name -> format for inputs of ``fmt``."""
    result = {"output": _named(contract.output.stored_as, fmt)}
    if contract.sums.row_sum not in ("unrounded", "rounded"):
        result["row_sum"] = _named(contract.sums.row_sum, fmt)
    return result


def _named(name: str | None, fmt: Format) -> Format:
    return fmt if name is None or name == "input" else FORMATS[name]


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    return [()]


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    shape = case.arrays["x"].shape
    return {"out": shape[:-1] if case.op == "logsumexp" else shape}


def uniform(case: Case, block: Block) -> Mapping[str, Enclosure]:
    """The row that weighs all it sees alike."""
    return {"the uniform row": uniform_rows(block.visible_keys())}


_EMPTY_ROW = {"empty_row": ("zero", "nan", "mean")}
OPS = tuple(
    Op(
        name=name,
        family="softmax",
        presets=presets.SOFTMAX,
        arrays={"x": Array("... n")},
        results={"out": dims},
        options={},
        conventions=conventions,
        trivial=trivial,
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        output_shapes=output_shapes,
        model=model,
        width=lambda case, key: int(case.arrays["x"].shape[-1]),
    )
    for name, dims, conventions, trivial in (
        ("softmax", "... n", _EMPTY_ROW, uniform),
        ("log_softmax", "... n", _EMPTY_ROW, no_trivial_outputs),
        ("logsumexp", "...", {"lse_base": ("e", "2"), "empty_row_lse": ("-inf", "+inf", "finite")}, no_trivial_outputs),
    )
)
