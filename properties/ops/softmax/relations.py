"""Checks of softmax, log_softmax and logsumexp: special values, sums, symmetries. The case's op says which it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.contract.constants import constants
from oracle.evaluate import enclose
from oracle.formats import Float64Array, StoredArray, format_of
from oracle.ops.contracts import preset_forms
from properties.checks.metamorphic import Outputs, full_bounds, observe, same_bits
from properties.judge.judgements import SLACK, draw_of, kept, purity
from properties.judge.pipeline import certify, conclude, structure
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.judge.weigh import weigh_all
from properties.ops.softmax.inputs import exact_multiple
from properties.subject import Input, Subject

# exp of this underflows to zero in every format, however it is computed, and 16-bit formats hold it.
FAR_BELOW = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What x [..., n] holds: rows without a value ([..., 1]), visible and hidden entries of the others."""

    x: Float64Array
    empty: NDArray[np.bool_]
    undefined: NDArray[np.bool_]
    visible: NDArray[np.bool_]
    hidden: NDArray[np.bool_]


def entries(case: Case) -> Entries:
    x = case.arrays["x"].astype(np.float64)
    undefined = np.asarray((np.isnan(x) | np.isposinf(x)).any(axis=-1, keepdims=True))
    empty = np.asarray(np.isneginf(x).all(axis=-1, keepdims=True))
    live = ~(undefined | empty)
    return Entries(x, empty, undefined, live & ~np.isneginf(x), live & np.isneginf(x))


def certified(subject: Subject, example: Input) -> Judgement:
    """P1, P9, P18: live rows within the bound; -inf entries of log_softmax are -inf; empty rows by the convention."""
    case = example.case
    held = entries(case)
    judged = (
        [certify(subject, case)]
        if case.op != "log_softmax" or not held.hidden.any()
        else [_with_hidden_logs(subject, case, held)]
    )
    if case.op == "logsumexp" and held.empty.any():
        judged.append(_empty_lse(subject, case, held))
    return worst_of(judged)


def _with_hidden_logs(subject: Subject, case: Case, held: Entries) -> Judgement:
    """The bound promises nothing where ln p is -inf: those entries are checked alone, and left out of the rest."""
    observed = subject.call(case)
    wrong = structure(subject, case, observed)
    if wrong is not None:
        return wrong
    out = observed.outputs["out"].copy()
    if (
        found := _not(np.isneginf(out.astype(np.float64)), held.hidden, "log_softmax of an entry -inf is not -inf")
    ) is not None:
        return found
    out[held.hidden] = 0
    settled = replace(observed, outputs={"out": out})

    def lower(presets: tuple[str, ...]) -> str:
        def ratio(preset: str) -> float:
            weighed = weigh_all(subject, case, settled, preset_forms(case.op, preset), ("out",))
            return float(weighed.most.min())

        return next((preset for preset in presets if ratio(preset) <= 1), "")

    weighed = weigh_all(subject, case, settled, subject.forms, ("out",))
    return conclude(subject, case, weighed, subject.forms, lower)


def _not(good: NDArray[np.bool_], where: NDArray[np.bool_], detail: str) -> Judgement | None:
    """FAIL at the first place that ``where`` marks and ``good`` does not, else None."""
    bad = where & ~good
    if not bad.any():
        return None
    at = [int(i) for i in np.argwhere(bad)[0]]
    return Judgement(Verdict.FAIL, Basis.EXACT, f"{detail}, first at {at}", worst={"output": "out", "index": at})


def _empty_lse(subject: Subject, case: Case, held: Entries) -> Judgement:
    stated = subject.conventions.get("empty_row_lse")
    out = observe(subject, case)["out"].astype(np.float64)
    right = {"-inf": np.isneginf(out), "+inf": np.isposinf(out), "finite": np.isfinite(out)}.get(stated or "")
    if right is None:
        return Judgement(Verdict.PASS, Basis.EXACT, "no convention is stated for empty rows")
    detail = f"logsumexp of an empty row is not {stated}, as the target's convention says"
    return _not(right, held.empty[..., 0], detail) or Judgement(
        Verdict.PASS, Basis.EXACT, f"an empty row gives {stated}"
    )


def excluded(subject: Subject, example: Input) -> Judgement:
    """P2: an entry -inf weighs nothing, like one that underflows or is not there; NaN stays in its row."""
    case = example.case
    held = entries(case)
    outputs = observe(subject, case)
    out = outputs["out"].astype(np.float64)
    judged = []
    if case.op != "logsumexp":
        nothing = np.isneginf(out) if case.op == "log_softmax" else out == 0
        value = "-inf" if case.op == "log_softmax" else "0"
        judged += [j for j in [_not(nothing, held.hidden, f"an entry -inf does not give {value}")] if j is not None]
    near = held.visible & (held.x > FAR_BELOW / 2)
    rows = np.asarray(near.any(axis=-1, keepdims=True))
    far = case.with_arrays(x=np.where(held.hidden, FAR_BELOW, held.x).astype(case.arrays["x"].dtype))
    where = rows[..., 0] if case.op == "logsumexp" else rows & ~held.hidden
    judged.append(same_bits(out, observe(subject, far)["out"], where, what=f"-inf replaced by {FAR_BELOW:g}"))
    judged.append(_compacted(subject, case, held, outputs))
    judged.append(_not_a_number(subject, case, held, out))
    return worst_of(judged)


def _compacted(subject: Subject, case: Case, held: Entries, first: Outputs) -> Judgement:
    """The first row with hidden entries, alone and without them."""
    flat = held.hidden.reshape(-1, held.x.shape[-1])
    chosen = np.flatnonzero(flat.any(axis=1))
    if not len(chosen):
        return Judgement(Verdict.PASS, Basis.DERIVED, "no entry is -inf")
    row = int(chosen[0])
    seen = ~flat[row]
    short = case.with_arrays(x=case.arrays["x"].reshape(-1, flat.shape[1])[row][seen][None])
    second = observe(subject, short)

    def of_row(values: StoredArray) -> Float64Array:
        wide = values.astype(np.float64)
        return wide.reshape(-1)[row : row + 1] if case.op == "logsumexp" else wide.reshape(flat.shape)[row][seen]

    gap = np.abs(of_row(first["out"]) - second["out"].astype(np.float64).reshape(-1))
    bounds = zip(full_bounds(subject, case, first), full_bounds(subject, short, second), strict=True)
    rooms = [of_row(a["out"]) + b["out"].reshape(-1) for a, b in bounds]
    return kept(subject, gap, rooms, what="a row without its -inf entries")


def _not_a_number(subject: Subject, case: Case, held: Entries, out: Float64Array) -> Judgement:
    rng = draw_of(case)
    n = held.x.shape[-1]
    flat = held.x.reshape(-1, n).copy()
    row, column = int(rng.integers(len(flat))), int(rng.integers(n))
    flat[row, column] = np.nan
    spoiled = case.with_arrays(x=flat.reshape(held.x.shape).astype(case.arrays["x"].dtype))
    found = observe(subject, spoiled)["out"].astype(np.float64).reshape(len(flat), -1)
    if not np.isnan(found[row]).all():
        detail = f"a NaN in row {row} is swallowed: its result holds a number"
        return Judgement(Verdict.FAIL, Basis.EXACT, detail, worst={"output": "out", "index": [row, column]})
    others = np.arange(len(flat))[:, None] != row
    return same_bits(out.reshape(len(flat), -1), found, others, what="rows beside one with a NaN")


def sums(subject: Subject, example: Input) -> Judgement:
    """P5: weights sum to 1, exponentials of log-weights too; a log-sum-exp lies between max and max + ln n."""
    case = example.case
    held = entries(case)
    outputs = observe(subject, case)
    out = outputs["out"].astype(np.float64)
    bounds = [b["out"] for b in full_bounds(subject, case, outputs)]
    n = held.x.shape[-1]
    with np.errstate(all="ignore"):
        if case.op == "logsumexp":
            top = np.where(held.visible, held.x, -np.inf).max(axis=-1)
            ceiling = top + np.log(np.maximum(held.visible.sum(axis=-1), 1))
            gap = np.maximum(np.maximum(top - out, out - ceiling), 0.0)
            rooms = [b + SLACK * (np.abs(top) + np.log(n)) for b in bounds]
            return kept(subject, gap, rooms, what="max <= L <= max + ln n")
        if case.op == "softmax":
            gap = np.abs(out.sum(axis=-1) - 1.0)
            rooms = [b.sum(axis=-1) + n * SLACK for b in bounds]
            return kept(subject, gap, rooms, what="weights sum to 1")
        p = enclose(case)[0].part("p").upper_abs().reshape(held.x.shape)
        gap = np.abs(np.exp(out).sum(axis=-1) - 1.0)
        loose = [np.where(held.hidden, 0.0, p * np.expm1(b)) for b in bounds]
        rooms = [b.sum(axis=-1) + n * SLACK for b in loose]
        return kept(subject, gap, rooms, what="exponentials of the log-weights sum to 1")


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: see `purity`; the other call has every row backwards and negated, the larger one has both."""
    case = example.case
    x = case.arrays["x"]
    wide = x.astype(np.float64)[..., ::-1]
    other = np.where(np.isfinite(wide), -wide, wide).astype(x.dtype)
    both = case.with_arrays(x=np.concatenate([other, x]))
    return purity(subject, case, case.with_arrays(x=other), both, lambda out: out[: len(x)])


def symmetries(subject: Subject, example: Input) -> Judgement:
    """P25: entries in another order, a common shift of the row, every entry twice."""
    case = exact_multiple(example.case, 15.0)
    x = case.arrays["x"]
    n = x.shape[-1]
    order = draw_of(case).permutation(n)
    log_two = float(np.log(2.0))
    factor, offset = {"softmax": (2.0, 0.0), "log_softmax": (1.0, log_two), "logsumexp": (1.0, -log_two)}[case.op]
    all_entries = np.arange(n)
    related = [
        _Related("entries in another order", case.with_arrays(x=x[..., order]), np.argsort(order)),
        _Related("every entry twice", case.with_arrays(x=np.concatenate([x, x], axis=-1)), all_entries, factor, offset),
    ]
    for shift in (16.0, -16.0):
        shifted = case.with_arrays(x=(x.astype(np.float64) + shift).astype(x.dtype))
        moved = -shift if case.op == "logsumexp" else 0.0
        related.append(_Related(f"every entry shifted by {shift:g}", shifted, all_entries, offset=moved))
    outputs = observe(subject, case)
    bounds = [b["out"] for b in full_bounds(subject, case, outputs)]
    return worst_of([_relation(subject, other, outputs["out"].astype(np.float64), bounds) for other in related])


@dataclass(frozen=True, slots=True, eq=False)
class _Related:
    """A case whose exact output, at the entries ``pick`` (ignored for logsumexp), times factor plus offset is known."""

    what: str
    case: Case
    pick: NDArray[np.intp]
    factor: float = 1.0
    offset: float = 0.0


def _relation(subject: Subject, other: _Related, expected: Float64Array, bounds: Sequence[Float64Array]) -> Judgement:
    seen = observe(subject, other.case)
    pick = (slice(None),) if subject.op == "logsumexp" else (..., other.pick)
    found = other.factor * seen["out"].astype(np.float64)[pick] + other.offset
    theirs = [other.factor * b["out"][pick] for b in full_bounds(subject, other.case, seen)]
    with np.errstate(all="ignore"):
        gap = np.where(found == expected, 0.0, np.abs(found - expected))
        slack = SLACK * (np.abs(found) + abs(other.offset))
        rooms = [a + b + slack for a, b in zip(bounds, theirs, strict=True)]
    return kept(subject, gap, rooms, what=other.what)


def equal_logits(subject: Subject, example: Input) -> Judgement:
    """P28: 2^k equal logits give 2^-k each: exactly in 16 bits, to a few units of the compute format otherwise.

    The sum of 2^k ones is exact in any order. What a correct kernel may still err by, relative to 2^-k: the division
    (4u), and where a form of the contract goes through L = ln n, the roundings of L (10 u ln n + 12 u bounds them).
    Less than half of the output's rounding below a power of two cannot show.
    """
    case = example.case
    if case.op != "softmax":
        return certified(subject, example)
    held = entries(case)
    n = held.visible.sum(axis=-1, keepdims=True)
    out = observe(subject, case)["out"]
    exact = np.where(held.visible, 1.0 / n, 0.0)
    gap = np.abs(out.astype(np.float64) - exact)
    rooms = []
    for form in subject.forms:
        c = constants(form, format_of(case.arrays["x"]))
        relative = c.u_div + (c.u * (10 * np.log(n) + 12) if form.output.from_lse else 0.0)
        relative = relative + (c.g(float(n.max())) if c.compute.precision < np.log2(n.max()) else 0.0)
        u_o = format_of(out).unit_roundoff
        rooms.append(np.where(relative < u_o / 2, 0.0, relative + u_o) * exact)
    return kept(subject, gap, rooms, what="equal logits")
