"""Counterfactuals: what a target with one particular defect would have computed, with room for honest errors.

A `Counterfactual` says "as if ..." and gives, for every output of every block, a `Prediction`: an enclosure of the
exact result under that defect, and the G1 bound of that result under the target's own contract. It *fits* if every
judged element of the observed output lies within the bound. Where a low-precision stage is the defect, the prediction
is the rounded result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.block import Block, Rows
from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.evaluate import enclose, refine
from oracle.formats import Float64Array, Format, StoredArray, format_of
from oracle.ops.table import op_named
from properties.judge.weigh import exact_blocks
from properties.subject import Subject

Key = tuple[int, ...]
Mask = NDArray[np.bool_]

# Rows whose radius exceeds this share of the bound are evaluated once more, at this precision.
COARSE, FINE_BITS, FINE_ROWS = 0.1, 256, 32


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """One output of one block, all [r, c].

    value, bound: an honest kernel with the defect lies within value +- (rad + bound); an infinite value means itself.
    breaks: it is inf or NaN there. lost: inf, NaN or zero. may_break: inf or NaN is possible. free: nothing is said.
    """

    value: Enclosure
    bound: Float64Array
    breaks: Mask
    lost: Mask
    may_break: Mask
    free: Mask

    def scaled(self, factor: ArrayLike) -> Prediction:
        """Every number times ``factor`` (a scalar, or an array that broadcasts), rounded in float64."""
        with np.errstate(all="ignore"):
            f = np.broadcast_to(np.asarray(factor, dtype=np.float64), self.value.hi.shape)
            hi = self.value.hi * f
            rad = self.value.rad * np.abs(f) + np.abs(hi) * 2.0**-51
            return replace(self, value=Enclosure(hi, self.value.lo * f, rad), bound=self.bound * np.abs(f))

    def at(self, value: ArrayLike) -> Prediction:
        """The same room around float64 numbers."""
        wide = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), self.value.hi.shape))
        with np.errstate(all="ignore"):
            rad = np.where(np.isfinite(wide), np.abs(wide) * 2.0**-50, 0.0)
        return replace(self, value=Enclosure(wide, np.zeros_like(wide), rad))

    def where(self, condition: Mask, other: Prediction) -> Prediction:
        """This one where the condition holds, ``other`` elsewhere."""

        def pick(a: Any, b: Any) -> Any:
            return np.where(np.broadcast_to(condition, a.shape), a, b)

        mine, theirs = self.value, other.value
        value = Enclosure(pick(mine.hi, theirs.hi), pick(mine.lo, theirs.lo), pick(mine.rad, theirs.rad))
        parts = (pick(getattr(self, n), getattr(other, n)) for n in ("bound", "breaks", "lost", "may_break", "free"))
        return Prediction(value, *parts)

    def mapped(self, f: Callable[[NDArray[Any]], NDArray[Any]]) -> Prediction:
        """Every array passed through ``f``, which selects or reorders."""
        value = Enclosure(*(f(getattr(self.value, n)) for n in ("hi", "lo", "rad")))
        return Prediction(value, *(f(getattr(self, n)) for n in ("bound", "breaks", "lost", "may_break", "free")))

    def marked(self, name: str, where: Any) -> Prediction:
        """With one of the masks raised where ``where`` (broadcast) says."""
        return replace(self, **{name: getattr(self, name) | np.broadcast_to(where, self.free.shape)})

    def fits(self, y: Float64Array) -> Mask:
        """[r, c]: which observed values the prediction explains."""
        finite = np.isfinite(y)
        with np.errstate(all="ignore"):
            near = self.value.distance(y) + self.value.rad <= self.bound
        near = np.where(np.isinf(self.value.hi), y == self.value.hi, near) | (self.may_break & ~finite)
        near = np.where(self.breaks, ~finite, near)
        return np.asarray(self.free | np.where(self.lost & ~self.breaks, ~finite | (y == 0), near))

    def ratio(self, y: Float64Array) -> Float64Array:
        """|y - value| / bound where both are finite numbers, else 0."""
        with np.errstate(all="ignore"):
            r = self.value.distance(y) / self.bound
        return np.where(np.isfinite(r) & ~self.free & ~self.breaks & ~self.lost, r, 0.0)


def of_rows(pieces: Sequence[tuple[Prediction, int]]) -> Prediction:
    """One row each of several predictions."""

    def stacked(get: Callable[[Prediction], StoredArray]) -> Any:
        return np.stack([get(p)[row] for p, row in pieces])

    value = Enclosure(stacked(lambda p: p.value.hi), stacked(lambda p: p.value.lo), stacked(lambda p: p.value.rad))
    return Prediction(
        value,
        stacked(lambda p: p.bound),
        stacked(lambda p: p.breaks),
        stacked(lambda p: p.lost),
        stacked(lambda p: p.may_break),
        stacked(lambda p: p.free),
    )


Predictions = dict[str, Prediction]


@dataclass(frozen=True, slots=True, eq=False)
class JudgedBlock:
    """One block as it is: the exact result, a prediction per form, observed float64 values, and the wrong ones."""

    block: Block
    truth: list[Predictions]
    values: dict[str, Float64Array]
    wrong: dict[str, Mask]


@dataclass(frozen=True, slots=True, eq=False)
class FailingCase:
    """A case, what the target gave for it, and where that breaks the contract.

    worst: the place in ``blocks`` of the one with most wrong elements, and the row in it.
    """

    subject: Subject
    case: Case
    outputs: Mapping[str, StoredArray]
    blocks: tuple[JudgedBlock, ...] = ()
    worst: tuple[int, int] = (0, 0)

    @property
    def formats(self) -> dict[str, Format]:
        return {n: format_of(v) for n, v in self.outputs.items()}

    def broken(self) -> bool:
        return any(mask.any() for judged in self.blocks for mask in judged.wrong.values())

    @property
    def main(self) -> str:
        """The name of the op's first output."""
        return op_named(self.case.op).outputs[0]

    def observed(self, block: Block) -> dict[str, Float64Array]:
        """[r, c] of every output at the block's rows, as float64."""
        with np.errstate(invalid="ignore"):
            held = {n: output for n, output in self.outputs.items() if block.holds(n)}
            return {n: block.take(n, output).astype(np.float64) for n, output in held.items()}


Source = Callable[[Key, Rows], tuple[Case, Key, Rows]]
Change = Callable[[FailingCase, Block, Predictions], Predictions]
Arrange = Callable[[Key, Rows, StoredArray], StoredArray]


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """One defect, as far as this case can show it.

    says: completes "as if ..."; ``{}`` stands for ``choice``, where several fit that differ in it alone.
    source: where the exact result of a block comes from (default: the block itself).
    block: the exact result itself, where it is that of no case.
    change: what the defect does to the predictions.
    contract: of a stage that rounds, fields of a contract that would allow it, none where no field can say so. If no
    rounded result fits bit by bit (the order of the target's sums is not known), a correlation with it and this
    contract's bound do; without one, twice the largest simulated error.
    fitted: numbers were read off this very output, each row's for itself.
    elsewhere: one number was, and this is the same defect on another case.
    arrange: how an array of the source's block [r, c] becomes one of the block's.
    """

    says: str
    source: Source | None = None
    change: Change | None = None
    contract: Mapping[str, object] | None = None
    fitted: bool = False
    elsewhere: Callable[[FailingCase], Counterfactual] | None = None
    choice: str = ""
    arrange: Arrange | None = None
    block: Callable[[Key, Rows], Block] | None = None

    @property
    def sentence(self) -> str:
        return self.says.format(self.choice)


def _none(case: Case) -> Iterable[Case]:
    return ()


@dataclass(frozen=True, slots=True)
class Table:
    """The counterfactuals of one op, and the other cases that a diagnosis asks about.

    related: (words, case) in which a defect may show that the case itself does not, None where there is no such.
    ranges: cases with large scores. wider: larger cases.
    """

    hypotheses: tuple[Hypothesis, ...]
    related: tuple[tuple[str, Callable[[Subject, Case], Case | None]], ...] = ()
    ranges: Callable[[Case], Iterable[Case]] = _none
    wider: Callable[[Case], Iterable[Case]] = _none


def of_case(says: str, case: Case) -> Counterfactual:
    """The target computed another case."""
    return Counterfactual(says, lambda key, rows: (case, key, rows))


def changed(says: str, change: Change, **more: Any) -> Counterfactual:
    """The target computed this case and something happened to the result."""
    return Counterfactual(says, None, change, **more)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One row of a table: a kind of defect, and its counterfactuals for a failing case (none where it cannot be meant).

    ranged: it shows at large scores only, and is asked about such, too.
    """

    name: str
    imagine: Callable[[FailingCase], Iterable[Counterfactual]]
    ranged: bool = False


def failing_case(subject: Subject, case: Case, outputs: Mapping[str, StoredArray]) -> FailingCase:
    """What one call gave, judged; blocks and rows as `certify` takes them."""
    bare = FailingCase(subject, case, outputs)
    blocks = []
    for block in exact_blocks(case):
        block, truth = _precise(bare, case, block, subject.forms)
        values = bare.observed(block)
        blocks.append((block, truth, values))
    # A contract is kept if one form is kept: the wrong elements are those of the form that is nearest to it.
    count = [sum(int((~t[f][n].fits(v[n])).sum()) for _, t, v in blocks for n in v) for f in range(len(subject.forms))]
    best = int(np.argmin(count))
    seen = tuple(JudgedBlock(b, t, v, {n: ~t[best][n].fits(v[n]) for n in v}) for b, t, v in blocks)
    return replace(bare, blocks=seen, worst=_worst(seen))


def exact_outputs(failing: FailingCase) -> dict[str, Float64Array]:
    """Midpoints of the exact results, as far as they were judged, in the outputs' shapes; NaN elsewhere."""
    found = {n: np.full(v.shape, np.nan) for n, v in failing.outputs.items()}
    for judged in failing.blocks:
        for n, p in judged.truth[0].items():
            judged.block.whole(n, found[n])[judged.block.rows] = p.value.hi
    return found


def _worst(blocks: Sequence[JudgedBlock]) -> tuple[int, int]:
    """The block with most wrong elements, and the row in it; the largest error among equals."""
    counts = [sum(int(mask.sum()) for mask in judged.wrong.values()) for judged in blocks]
    judged = blocks[place := int(np.argmax(counts))]
    wrong = np.sum([mask.sum(axis=1) for mask in judged.wrong.values()], axis=0)
    ratio = np.max([judged.truth[0][n].ratio(v).max(axis=1, initial=0.0) for n, v in judged.values.items()], axis=0)
    return place, int(max(range(len(wrong)), key=lambda row: (wrong[row], ratio[row])))


def predict(
    failing: FailingCase, c: Counterfactual, key: Key, rows: Rows, forms: Sequence[Contract]
) -> list[Predictions]:
    """What an honest kernel with this defect gives for a block, one dict of outputs per form."""
    if c.block is not None:
        block = c.block(key, rows)
        per_form = _predictions(failing, failing.case, block, forms)
    elif c.source is None:
        block, per_form = _as_judged(failing, key, rows)
        if forms != failing.subject.forms:
            per_form = _predictions(failing, failing.case, block, forms)
    else:
        case, at, taken = c.source(key, rows)
        found = enclose(case, rows={at: taken}, blocks=[at])[0]
        block, per_form = _precise(failing, case, found, forms)
    if c.change is not None:
        here = replace(block, key=key, rows=rows)
        per_form = [c.change(failing, here, predictions) for predictions in per_form]
    if (arrange := c.arrange) is not None:
        per_form = [{n: p.mapped(lambda a: arrange(key, rows, a)) for n, p in ps.items()} for ps in per_form]
    return per_form


def _as_judged(failing: FailingCase, key: Key, rows: Rows) -> tuple[Block, list[Predictions]]:
    """Neighbouring rows of a block that was judged."""
    judged = next(judged for judged in failing.blocks if judged.block.key == key)
    if len(rows) == len(judged.block.rows):
        return judged.block, judged.truth
    start = int(np.searchsorted(judged.block.rows, rows[0]))
    part = slice(start, start + len(rows))
    cut = [{n: p.mapped(lambda a: a[part]) for n, p in predictions.items()} for predictions in judged.truth]
    return judged.block.between(part.start, part.stop), cut


def _precise(
    failing: FailingCase, case: Case, block: Block, forms: Sequence[Contract]
) -> tuple[Block, list[Predictions]]:
    per_form = _predictions(failing, case, block, forms)
    with np.errstate(all="ignore"):
        coarse = [(p.value.rad > COARSE * p.bound) & ~p.free for p in per_form[0].values()]
    which = np.any([c.any(axis=1) for c in coarse], axis=0)
    if not which.any() or which.sum() > FINE_ROWS:
        return block, per_form
    block = refine(case, block, which, FINE_BITS)
    return block, _predictions(failing, case, block, forms)


def _predictions(failing: FailingCase, case: Case, block: Block, forms: Sequence[Contract]) -> list[Predictions]:
    names = [name for name in failing.outputs if block.holds(name)]
    bounded = bounds_of(case.op)(case, block, forms, failing.formats)
    per_form: list[Predictions] = []
    for bounds in bounded:
        predictions = {}
        for name in names:
            value, bound = block.part(name), np.where(np.isnan(bounds[name].bound), np.inf, bounds[name].bound)
            silent = np.zeros(value.hi.shape, dtype=bool)
            # Where nothing is promised (an unbounded element), any number will do, but not any NaN.
            made = Prediction(value, bound, silent, silent, bounds[name].may_overflow | silent, silent)
            made = made.marked("free", block.undefined[:, None])
            if (unit := failing.subject.nat(name)) != 1:
                made = made.scaled(unit)
            made = made.marked("free", block.empty[:, None]) if name == "lse" and "sink" in block.values else made
            predictions[name] = _empty_rows(failing.subject, name, block.empty[:, None], made)
        per_form.append(predictions)
    return per_form


def _empty_rows(subject: Subject, name: str, empty: Mask, made: Prediction) -> Prediction:
    if not empty.any():
        return made
    made = replace(made, may_break=made.may_break & ~empty)
    is_lse = name == "lse" or subject.op == "logsumexp"
    stated = subject.conventions.get("empty_row_lse" if is_lse else "empty_row") if name in ("out", "lse") else None
    match stated:
        case "zero" | "-inf" | "+inf":
            there = replace(made.at(0.0 if stated == "zero" else float(stated)), bound=np.zeros(made.bound.shape))
        case "nan":
            there = made.marked("breaks", True)
        case _:
            there = made.marked("free", True)
    return there.where(empty, made)
