"""Errors of all blocks of a case against each form's bound: what is surely and what is possibly reached.

The decision per element is three-way: PASS if |error| + radius <= bound, FAIL if |error| - radius > bound, else the
oracle is made more precise until it can tell, or UNDECIDED. Rows of all blocks stand one after another: heads are
small, and numpy's calls cost more than what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block, Rows
from oracle.bounds.bounded import Bounded
from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.error import Errors, measure
from oracle.evaluate import PRECISIONS, enclose, refine
from oracle.formats import Float64Array, Format, format_of
from oracle.ops.table import op_named
from properties.judge.empty_rows import empty_rows, promised_rows
from properties.judge.remembered import bounded
from properties.subject import Subject, sampled_rows
from targets.calling.target import Observed

Mask = NDArray[np.bool_]
BlockBounds = Sequence[Mapping[str, Bounded]]
"""By form: the bounds of one block's outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One output, of all blocks that are a part of it.

    parts: (index of the block, its first row, the row after its last). errors [R, c]. bounds, may_overflow
    [form, R, c]: see `Bounded`. live [R]: rows of which something is promised.
    """

    parts: Sequence[tuple[int, int, int]]
    errors: Errors
    bounds: Float64Array
    may_overflow: Mask
    live: Mask

    def place(self, row: int) -> tuple[int, int]:
        """(index of the block, row there) of a row."""
        return next((index, row - start) for index, start, stop in self.parts if row < stop)


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A case judged: per form and output the largest ratio surely reached (``least``) and possibly reached (``most``).

    blocks: as precise as it took. pools: by output, in the order of the columns of both. exempt: elements that are not
    finite where the first form promises nothing else. convention: what contradicts one, or nothing.
    """

    blocks: Sequence[Block]
    pools: Mapping[str, Pool]
    least: Float64Array
    most: Float64Array
    exempt: int
    convention: str


def weigh_all(
    subject: Subject, case: Case, observed: Observed, forms: Sequence[Contract], outputs: Sequence[str]
) -> Weighed:
    """Errors of all blocks of which some output was asked for and given, with the oracle precise enough to decide."""
    given = {n: v for n, v in observed.outputs.items() if n in outputs}
    formats = {n: format_of(v) for n, v in given.items()}
    rows = rows_to_certify(case)
    blocks = [block for block in enclose(case, rows=rows) if any(block.holds(n) for n in given)]
    bounds: list[BlockBounds] = bounded(case, rows, blocks, forms, formats)
    values = [{n: block.take(n, v) for n, v in given.items() if block.holds(n)} for block in blocks]
    promised = [promised_rows(subject, case, block, held) for block, held in zip(blocks, values, strict=True)]
    contradictions = (empty_rows(subject, case, block, held) for block, held in zip(blocks, values, strict=True))
    convention = next((text for text in contradictions if text), "")
    names = list(dict.fromkeys(n for held in values for n in held))
    for step, precision in enumerate((*PRECISIONS, None)):
        pools = {n: _pooled(n, values, formats[n], blocks, promised, bounds, subject.nat(n)) for n in names}
        ratios = {n: _ratios(pool, first=step == 0) for n, pool in pools.items()}
        unsure = _unsure(pools, ratios, len(blocks))
        if precision is None or not unsure:
            break
        for index, which in unsure.items():
            blocks[index] = refine(case, blocks[index], which, precision)
            bounds[index] = bounds_of(case.op)(case, blocks[index], forms, formats)
    least, most = (np.stack([found[i].max(axis=1, initial=0.0) for found in ratios.values()], axis=1) for i in (0, 1))
    exempt = sum(int((_legal(pool)[0] & pool.live[:, None]).sum()) for pool in pools.values())
    return Weighed(blocks, pools, least, most, exempt, convention)


def rows_to_certify(case: Case) -> dict[tuple[int, ...], Rows]:
    """The rows sampled of each block (head) that is not certified in full."""
    op = op_named(case.op)
    keys = op.blocks(case)
    rows = {key: sampled_rows(op.row_count(case, key), op.width(case, key), len(keys)) for key in keys}
    return {key: chosen for key, chosen in rows.items() if chosen is not None}


def exact_blocks(case: Case) -> list[Block]:
    """Enclosures of the rows to certify, every block (head) of the case covered."""
    return enclose(case, rows=rows_to_certify(case))


def first_kept(ratios: Float64Array) -> int:
    """The first form whose ratio is at most 1, else the one nearest to it."""
    kept = np.flatnonzero(ratios <= 1)
    return int(kept[0]) if len(kept) else int(np.argmin(ratios))


def _pooled(
    name: str,
    values: Sequence[Mapping[str, NDArray[Any]]],
    fmt: Format,
    blocks: Sequence[Block],
    promised: Sequence[NDArray[np.bool_]],
    bounds: Sequence[BlockBounds],
    unit: float,
) -> Pool:
    """``unit``: what the output has in the place of a nat."""
    held = [index for index, of_block in enumerate(values) if name in of_block]
    ends = np.cumsum([len(values[index][name]) for index in held]).tolist()
    parts = list(zip(held, [0, *ends[:-1]], ends, strict=True))
    live = _joined([promised[index] for index in held])
    exact = [blocks[index].part(name).parts() for index in held]
    enclosure = _times(Enclosure(*(_joined(list(part)) for part in zip(*exact, strict=True))), unit)
    errors = measure(_joined([values[index][name] for index in held]), enclosure, fmt, counted=live[:, None])
    found = [(values[index][name].shape, bounds[index][form][name]) for form in range(len(bounds[0])) for index in held]
    by_form = (len(bounds[0]), *errors.absolute.shape)
    bound = _joined([_of_shape(b.bound, shape) for shape, b in found]).reshape(by_form)
    may_overflow = _joined([_of_shape(b.may_overflow, shape) for shape, b in found]).reshape(by_form)
    return Pool(parts, errors, bound * unit, may_overflow, live)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _of_shape(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return array if array.shape == shape else np.broadcast_to(array, shape)


def _times(exact: Enclosure, unit: float) -> Enclosure:
    """The enclosure in another unit."""
    if unit == 1:
        return exact
    hi = exact.hi * unit
    return Enclosure(hi, exact.lo * unit, exact.rad * unit + np.abs(hi) * 2.0**-51)


Ratios = tuple[Float64Array, Float64Array, Mask, Mask]
"""(least, most, straddling [form, R], coarse [R]): largest ratios of a row, and whether the oracle must say more."""


def _ratios(pool: Pool, *, first: bool) -> Ratios:
    """Over the elements of each row to which a bound applies. ``first``: also whether a radius is coarse."""
    errors = pool.errors
    low, high = _interval(errors, pool.bounds)
    use = pool.live[:, None] & ~_legal(pool)
    if not use.all():
        low, high = np.where(use, low, 0.0), np.where(use, high, 0.0)
    straddling: Mask = np.asarray(((low <= 1) & (high > 1)).any(axis=2))
    # The first question asked of the oracle is a hundredth of the bound.
    coarse = use[0] & errors.finite & (errors.radius > pool.bounds[0] / 100)
    rows = coarse.any(axis=1) & first
    return low.max(axis=2, initial=0.0), high.max(axis=2, initial=0.0), straddling, rows


def _legal(pool: Pool) -> Mask:
    """[form, R, c]: non-finite where that is no defect."""
    return pool.may_overflow & ~pool.errors.finite


def _unsure(pools: Mapping[str, Pool], ratios: Mapping[str, Ratios], count: int) -> dict[int, Mask]:
    """Rows still undecided of those of the ``count`` blocks that have some."""
    if not any(straddling.any() or coarse.any() for _, _, straddling, coarse in ratios.values()):
        return {}
    result = {}
    for block in range(count):
        own = [
            [part[..., start:stop] for part in ratios[name]]
            for name, pool in pools.items()
            for index, start, stop in pool.parts
            if index == block
        ]
        # Only the first form that may be kept needs an answer.
        form = first_kept(np.max([least.max(axis=1, initial=0.0) for least, _, _, _ in own], axis=0))
        rows = np.logical_or.reduce([straddling[form] | coarse for _, _, straddling, coarse in own])
        if rows.any():
            result[block] = rows
    return result


def _interval(errors: Errors, bounds: Float64Array) -> tuple[Float64Array, Float64Array]:
    """(least, most) of |error| / bound [form, R, c]; 0 / 0 is 0, a non-finite observation is inf, an unbounded
    enclosure (0, inf)."""
    less, more = errors.absolute - errors.radius, errors.absolute + errors.radius
    with np.errstate(all="ignore"):
        low = np.where(errors.absolute > errors.radius, less / bounds, 0.0)
        high = np.where(more > 0, more / bounds, 0.0)
    low = np.where(errors.finite, np.where(np.isnan(low), 0.0, low), np.inf)
    high = np.where(errors.finite & ~np.isnan(high), high, np.inf)
    if errors.decided.all():
        return low, high
    return np.where(errors.decided | ~errors.finite, low, 0.0), np.where(errors.decided, high, np.inf)
