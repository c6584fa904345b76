"""Enclosures of whole ops: evaluate a case block by block, row by row, as precisely as the question needs.

A *block* is one head (or one matrix of rows for softmax); within it every output row is independent of the others, so
any subset of rows can be certified alone. `enclose` evaluates a block in one arithmetic; `refine` evaluates chosen rows
again in `arb` at a higher precision and puts them in place, in the manner of Ziv's adaptive evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import Ball, BallArithmetic
from oracle.arithmetic.base import Arithmetic, Value
from oracle.case import Case
from oracle.formats import Float64Array

PRECISIONS = (128, 256, 512, 1024)
"""Precisions of arb, in bits, tried in turn before an element counts as UNDECIDED."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Enclosure:
    """Intervals: the exact value lies in hi + lo +- rad. Arrays of one shape; rad is inf where nothing is known."""

    hi: Float64Array
    lo: Float64Array
    rad: Float64Array

    def upper_abs(self) -> Float64Array:
        """An upper bound of the exact magnitude."""
        with np.errstate(over="ignore"):
            return np.asarray((np.abs(self.hi) + np.abs(self.lo) + self.rad) * (1 + 2.0**-50))

    def distance(self, y: Any) -> Float64Array:
        """|y - (hi + lo)| in float64, rounded up by less than 2^-50 of itself. ``y`` float64 values; nan stays nan."""
        with np.errstate(invalid="ignore", over="ignore"):
            # y - hi is exact when y and hi are close (Sterbenz); otherwise lo does not matter at this accuracy.
            return np.asarray(np.abs((np.asarray(y, dtype=np.float64) - self.hi) - self.lo))

    def parts(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        return self.hi, self.lo, self.rad

    def rows(self, index: Any) -> Enclosure:
        return Enclosure(self.hi[index], self.lo[index], self.rad[index])


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One head evaluated on some of its rows.

    key: names the block; unless ``at`` says otherwise, its index in the leading dimensions of the outputs. rows [r]:
    which rows. values: the op's named parts as opaque values of ``ar``. empty [r]: rows without a visible key.
    undefined [r]: rows that read a NaN or inf, whose exact value does not exist. visible [r, n] or None. patches:
    parts replaced row by row at higher precision. outputs: those that this block is a part of (None: all of the op's),
    where different outputs have rows of different kinds, as the gradients of queries and of keys have. places: output
    -> index of the block's part of it, where one index is not that of all outputs.
    """

    key: tuple[int, ...]
    rows: Rows
    ar: Arithmetic
    values: Mapping[str, Value]
    empty: NDArray[np.bool_]
    undefined: NDArray[np.bool_]
    visible: NDArray[np.bool_] | None = None
    patches: Mapping[str, Enclosure] = field(default_factory=dict)
    at: tuple[int, ...] | None = None
    outputs: tuple[str, ...] | None = None
    places: Mapping[str, tuple[int | slice, ...]] = field(default_factory=dict)

    @property
    def index(self) -> tuple[int, ...]:
        """Where the block stands in the leading dimensions of its outputs."""
        return self.key if self.at is None else self.at

    def holds(self, output: str) -> bool:
        """Whether the block is a part of this output."""
        return self.outputs is None or output in self.outputs

    def whole(self, name: str, output: NDArray[Any]) -> NDArray[Any]:
        """The block's part of a whole output array, all rows of it: a view [R, c] where the layout allows one."""
        index = self.places.get(name, self.index)
        held = output[index] if index else output.reshape(-1, self.part(name).hi.shape[1])
        return held[:, None] if held.ndim == 1 else held

    def take(self, name: str, output: NDArray[Any]) -> NDArray[Any]:
        """[r, c] of a whole output array at the block's rows."""
        return np.asarray(self.whole(name, output)[self.rows])

    def visible_keys(self) -> NDArray[np.bool_]:
        """``visible``; ValueError for an op that has no keys."""
        if self.visible is None:
            raise ValueError("this op has no keys, so nothing says which are visible")
        return self.visible

    def part(self, name: str) -> Enclosure:
        """The enclosure of one named part (``out``, ``lse``, ``scores``, ...)."""
        if name in self.patches:
            return self.patches[name]
        with self.ar.working():
            hi, lo, rad = self.ar.to_enclosure(self.values[name])
        return Enclosure(hi, lo, rad)

    def between(self, start: int, stop: int) -> Block:
        """The block of rows start..stop alone; of parts that have no row for each of the block's, all is kept."""
        count = len(self.rows)
        with self.ar.working():
            values = {
                name: self.ar.rows(value, start, stop) if _height(value) == count else value
                for name, value in self.values.items()
            }
        patches = {name: part.rows(slice(start, stop)) for name, part in self.patches.items()}
        visible = None if self.visible is None else self.visible[start:stop]
        rows, empty, undefined = self.rows[start:stop], self.empty[start:stop], self.undefined[start:stop]
        return replace(
            self,
            rows=rows,
            values=values,
            empty=empty,
            undefined=undefined,
            visible=visible,
            patches=patches,
        )


def _height(value: Value) -> int:
    return int((value.mid if isinstance(value, Ball) else value).shape[0])


def enclose(
    case: Case,
    *,
    rows: Mapping[tuple[int, ...], Rows] | Rows | None = None,
    blocks: Sequence[tuple[int, ...]] | None = None,
    ar: Arithmetic | None = None,
) -> list[Block]:
    """Proven enclosures of all parts of every block of ``case`` (or of ``blocks``), on ``rows`` (default: all rows).

    ``ar`` is the arithmetic, `ball` by default. Raises ValueError naming the argument if the case does not fit its op.
    """
    from oracle.ops.table import op_named

    op = op_named(case.op)
    arithmetic = ar if ar is not None else BallArithmetic()
    result = []
    for key in op.blocks(case) if blocks is None else blocks:
        chosen = rows.get(key) if isinstance(rows, Mapping) else rows
        count = op.row_count(case, key)
        index = np.arange(count, dtype=np.int64) if chosen is None else np.asarray(chosen, dtype=np.int64)
        with arithmetic.working():
            result.append(op.evaluate(arithmetic, case, key, index))
    return result


def refine(case: Case, block: Block, which: NDArray[np.bool_], precision: int) -> Block:
    """The block with the rows marked in ``which`` [r] evaluated again in arb at ``precision`` bits."""
    if not which.any():
        return block
    fine = enclose(case, rows=block.rows[which], blocks=[block.key], ar=arb_arithmetic(precision))[0]
    patches = {}
    for name in block.values:
        coarse, exact = block.part(name), fine.part(name)
        if coarse.hi.shape[0] != len(block.rows):
            continue
        hi, lo, rad = coarse.hi.copy(), coarse.lo.copy(), coarse.rad.copy()
        hi[which], lo[which], rad[which] = exact.hi, exact.lo, exact.rad
        patches[name] = Enclosure(hi, lo, rad)
    return replace(block, patches=patches)
