"""Relations between outputs of the same target on related inputs.

Two outputs that are equal in exact arithmetic may differ by the sum of their two derived bounds; bit-equality is
asked only where the relation makes every rounding identical (rows that do not see a changed key, scalings by powers
of two).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import Float64Array, StoredArray, format_of
from oracle.ops.table import op_named
from properties.judge.empty_rows import unpromised
from properties.judge.pipeline import structure
from properties.judge.remembered import bounded, judged
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Subject

Outputs = Mapping[str, StoredArray]


class Unobserved(Exception):
    """A call of the target failed; carries the judgement that says how."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(judgement.detail)
        self.judgement = judgement


def observe(subject: Subject, case: Case) -> Outputs:
    """The outputs of one call; `Unobserved` where it failed or broke gate G0."""
    observed = subject.call(case)
    wrong = structure(subject, case, observed)
    if wrong is not None:
        raise Unobserved(wrong)
    return observed.outputs


def exact_output(case: Case) -> Float64Array:
    """The op's first output as it is exactly, nearest float64; 0 where nothing is computed."""
    row = op_named(case.op)
    whole = np.zeros(row.output_shapes(case)[row.outputs[0]])
    for block in enclose(case):
        block.whole(row.outputs[0], whole)[block.rows] = block.part(row.outputs[0]).hi
    return whole


Masks = Mapping[str, NDArray[np.bool_]]


def full_bounds(
    subject: Subject, case: Case, outputs: Outputs, *, where: Masks | None = None
) -> list[dict[str, Float64Array]]:
    """Per form: each output's bound in the output's own shape; inf where nothing is promised (empty or undefined
    rows).

    where: elements of each output whose bound matters (default: all). A block without any stays inf: its bound is not
    worked out, and nothing is enclosed where no element of any output matters.
    """
    result = [{n: np.full(v.shape, np.inf) for n, v in outputs.items()} for _ in subject.forms]
    if where is not None and not any(mask.any() for mask in where.values()):
        return result
    formats = {n: format_of(v) for n, v in outputs.items()}
    held = [(block, [n for n in outputs if block.holds(n)]) for block in enclose(case)]
    if where is not None:
        held = [(b, names) for b, names in held if any(_part(b, n, where[n]).any() for n in names if n in where)]
    found = bounded(case, {}, [block for block, _ in held], subject.forms, formats)
    for (block, names), by_form in zip(held, found, strict=True):
        live = ~(block.empty | block.undefined) & (not unpromised(subject, case, block.key))
        for form, bounds in enumerate(by_form):
            for name in names:
                values = np.where(live[:, None] & ~bounds[name].may_overflow, bounds[name].bound, np.inf)
                target = _part(block, name, result[form][name])
                target[...] = values.reshape(target.shape)
    return result


def widest(subject: Subject, case: Case, outputs: Outputs, where: NDArray[np.bool_] | None = None) -> Float64Array:
    """The widest bound that a form of the contract gives ``out``; inf in blocks without an element of ``where``."""
    held = None if where is None else {"out": where}
    bounds = full_bounds(subject, case, {"out": outputs["out"]}, where=held)
    return np.asarray(np.max([b["out"] for b in bounds], axis=0))


def _part(block: Block, name: str, whole: StoredArray) -> StoredArray:
    """The view of a whole output that the block, evaluated in full, is."""
    index = block.places.get(name, block.index)
    return np.asarray(whole[index]) if index else whole.reshape(len(block.rows), -1)


def differing(first: Outputs, second: Outputs) -> Masks:
    """Where two outputs of the same shapes are not the same number: what needs no room needs no bound."""
    return {n: first[n].astype(np.float64) != np.asarray(second[n]).astype(np.float64) for n in first if n in second}


def agree(subject: Subject, case: Case, first: Outputs, other: Case, second: Outputs, *, what: str) -> Judgement:
    """PASS if the two outputs, equal in exact arithmetic, differ by at most the sum of their bounds (in one form)."""
    seen = [(case, first), (other, second)]
    return judged("agree", subject, seen, lambda: _agree(subject, case, first, other, second, what), words=[what])


def _agree(subject: Subject, case: Case, first: Outputs, other: Case, second: Outputs, what: str) -> Judgement:
    where = differing(first, second)
    one_by_form, two_by_form = (full_bounds(subject, c, o, where=where) for c, o in ((case, first), (other, second)))
    ratios, places = [], []
    for one, two in zip(one_by_form, two_by_form, strict=True):
        worst, place = 0.0, (next(iter(first)), 0)
        for name in first:
            if name not in second:
                continue
            gap = np.abs(first[name].astype(np.float64) - second[name].astype(np.float64))
            room = one[name] + two[name]
            with np.errstate(all="ignore"):
                ratio = np.where(np.isinf(room) | (gap == 0), 0.0, gap / room)
            ratio = np.where(np.isnan(gap) & ~np.isinf(room), np.inf, np.where(np.isnan(ratio), 0.0, ratio))
            if float(ratio.max(initial=0.0)) > worst:
                worst, place = float(ratio.max()), (name, int(ratio.argmax()))
        ratios.append(worst)
        places.append(place)
    best = int(np.argmin(ratios))
    forms = {form.label: r for form, r in zip(subject.forms, ratios, strict=True)}
    if ratios[best] <= 1:
        return Judgement(
            Verdict.PASS, Basis.DERIVED, f"{what}: within the sum of both bounds", ratios[best], forms=forms
        )
    name, flat = places[best]
    at = [int(i) for i in np.unravel_index(flat, first[name].shape)]
    worst_at = {
        "output": name,
        "index": at,
        "observed": float(first[name].reshape(-1)[flat]).hex(),
        "exact": float(second[name].reshape(-1)[flat]).hex(),
    }
    detail = f"{what}: the two outputs differ by {ratios[best]:.3g} times the sum of their bounds"
    return Judgement(Verdict.FAIL, Basis.DERIVED, detail, ratios[best], forms=forms, worst=worst_at)


def same_bits(first: StoredArray, second: StoredArray, where: NDArray[np.bool_], *, what: str) -> Judgement:
    """PASS if the two arrays have the same bits wherever ``where`` (broadcast) says; NaNs of any payload are equal."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    equal = (a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))
    # A zero may change its sign with the order of summation: the value is what is asked.
    equal |= (a == 0) & (b == 0)
    wrong = ~equal & np.broadcast_to(where, a.shape)
    if not wrong.any():
        return Judgement(Verdict.PASS, Basis.EXACT, f"{what}: bit-equal")
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    worst = {"output": "out", "index": list(at), "observed": float(b[at]).hex(), "exact": float(a[at]).hex()}
    return Judgement(
        Verdict.FAIL, Basis.EXACT, f"{what}: {int(wrong.sum())} elements changed, first at {list(at)}", worst=worst
    )
