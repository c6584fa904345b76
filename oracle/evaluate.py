"""Enclosures of whole ops: evaluate a case block by block, row by row, as precisely as the question needs.

`enclose` evaluates a block in one arithmetic; `refine` evaluates chosen rows again in `arb` at a higher precision and
puts them in place, in the manner of Ziv's adaptive evaluation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.base import Arithmetic
from oracle.block import Block, Rows, at_once
from oracle.case import Case
from oracle.enclosure import Enclosure
from oracle.ops.op import Op
from oracle.ops.table import op_named
from oracle.store.kept import current
from oracle.store.keys import key_of

PRECISIONS = (128, 256, 512, 1024)
"""Precisions of arb, in bits, tried in turn before an element counts as UNDECIDED."""


def enclose(
    case: Case,
    *,
    rows: Mapping[tuple[int, ...], Rows] | Rows | None = None,
    blocks: Sequence[tuple[int, ...]] | None = None,
    ar: Arithmetic[Any] | None = None,
) -> list[Block]:
    """Proven enclosures of all parts of every block of ``case`` (or of ``blocks``), on ``rows`` (default: all rows).

    ``ar`` is the arithmetic, `ball` by default. Raises ValueError naming the argument if the case does not fit its op.
    While a store is open, the same question in the default arithmetic has the same blocks for an answer.
    """
    store = current()
    if store is None or ar is not None:
        return _enclosed(case, rows, blocks, ar if ar is not None else BallArithmetic())
    key = key_of(case.identity(), rows_key(rows), repr(blocks))
    return list(
        store.recall("blocks", key, lambda: tuple(_enclosed(case, rows, blocks, BallArithmetic())), size=_bytes)
    )


def rows_key(rows: Mapping[tuple[int, ...], Rows] | Rows | None) -> bytes:
    """What names a choice of rows; a mapping that chooses nothing is no choice."""
    if rows is None or (isinstance(rows, Mapping) and not rows):
        return b"all"
    if not isinstance(rows, Mapping):
        return np.asarray(rows, dtype=np.int64).tobytes()
    chosen = (f"{key}: {np.asarray(index, dtype=np.int64).tolist()}" for key, index in rows.items())
    return ";".join(sorted(chosen)).encode()


def _bytes(blocks: Iterable[Block]) -> int:
    """About what they take, with parts that were asked for."""
    return sum(block.weight() for block in blocks)


def _enclosed(
    case: Case,
    rows: Mapping[tuple[int, ...], Rows] | Rows | None,
    blocks: Sequence[tuple[int, ...]] | None,
    arithmetic: Arithmetic[Any],
) -> list[Block]:
    op = op_named(case.op)
    asked = []
    for key in op.blocks(case) if blocks is None else blocks:
        chosen = rows.get(key) if isinstance(rows, Mapping) else rows
        count = op.row_count(case, key)
        index = np.arange(count, dtype=np.int64) if chosen is None else np.asarray(chosen, dtype=np.int64)
        asked.append((key, index))
    result: list[Block] = []
    with arithmetic.working():
        for keys, index in stacked(op, case, asked) if arithmetic.stacks else [([key], index) for key, index in asked]:
            if len(keys) == 1:
                result.append(op.evaluate(arithmetic, case, keys[0], index))
            else:
                result.extend(op.evaluate(arithmetic, case, as_one(keys), index).apart(keys))
    return result


def stacked(
    op: Op, case: Case, asked: Sequence[tuple[tuple[int, ...], Rows]]
) -> Iterator[tuple[list[tuple[int, ...]], Rows]]:
    """Neighbouring blocks that may be evaluated at once, with their rows: as many small ones as stay in cache."""

    def alike(item: tuple[tuple[int, ...], Rows]) -> Hashable:
        key, rows = item
        return key if op.together is None else (op.together(case, key), rows.tobytes())

    for _, same in groupby(asked, alike):
        (key, rows), *others = same
        keys = [key, *(other for other, _ in others)]
        many = at_once(len(rows) * op.width(case, key))
        for start in range(0, len(keys), many):
            yield keys[start : start + many], rows


def as_one(keys: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int64], ...]:
    """The key of a stack."""
    return tuple(np.array(keys, dtype=np.int64).T)


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
