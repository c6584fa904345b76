"""Judgements that the tables of several ops share: purity, structure, gaps against rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from oracle.case import Case
from oracle.formats import Float64Array, StoredArray
from properties.checks.metamorphic import agree, exact_output, full_bounds, observe, same_bits
from properties.judge.pipeline import certify, structure
from properties.judge.remembered import judged
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Input, Subject
from targets.calling.target import run

# Of sums that checks form themselves in float64, relative to the sum of magnitudes and the number of terms.
SLACK = 2.0**-51


def draw_of(case: Case) -> np.random.Generator:
    """Random numbers that follow from the case alone, so that a saved case repeats the check."""
    return np.random.default_rng(int(case.digest(), 16))


def structure_only(subject: Subject, example: Input) -> Judgement:
    """P23: dtype, shape and device of the outputs."""
    wrong = structure(subject, example.case, subject.call(example.case))
    return wrong or Judgement(Verdict.PASS, Basis.EXACT, "dtype and shape as stated")


def within_bound(subject: Subject, example: Input) -> Judgement:
    """P1, P9, P17, P18: every output within the bound derived from the contract."""
    return certify(subject, example.case)


def options_matter(
    subject: Subject, example: Input, *, names: Iterable[str] | None = None, widest: bool = False
) -> Judgement:
    """P17: the result is within its bound, and the effect of each option larger (else the input tests nothing).

    names: those asked about (default: all that a function may have). widest: larger than the bound of any form of the
    contract, not of the first.
    """
    case, row = example.case, subject.target.row
    asked = [name for name in row.options if name in row.parameters] if names is None else names
    certified, given = certify(subject, case), [name for name in asked if name in case.options]
    if certified.verdict is not Verdict.PASS or not given:
        return certified
    outputs = observe(subject, case)

    def unseen() -> Judgement:
        bounds = full_bounds(subject, case, outputs)
        room = np.max([b[row.outputs[0]] for b in (bounds if widest else bounds[:1])], axis=0)
        exact = exact_output(case)
        for name in given:
            if not (np.abs(exact - exact_output(case.without_options(name))) > 2 * room).any():
                detail = f"option {name} has no visible effect on this input"
                return Judgement(Verdict.VACUOUS, Basis.DERIVED, detail)
        return Judgement(Verdict.PASS, Basis.DERIVED)

    found = judged("options matter", subject, [(case, outputs)], unseen)
    return (
        certified if found.verdict is Verdict.PASS else replace(certified, verdict=found.verdict, detail=found.detail)
    )


def purity(
    subject: Subject, case: Case, other: Case, wider: Case, pick: Callable[[StoredArray], StoredArray]
) -> Judgement:
    """P15: inputs and the memory next to them unchanged, the latter without influence, and independent calls.

    ``other``: other content in the same shapes. ``wider``: a call of other shapes that holds ``other``, whose outputs
    `pick` takes out of the wider call's. ``other`` gives the same after a call with ``case`` as inside ``wider``, and
    ``case`` the same bits after a call with ``other``.
    """
    first = observe(subject, case)
    around = run(subject.target, case, device=subject.device, seconds=subject.seconds, guarded=True)
    if around.fault is not None:
        return Judgement(Verdict.FAIL, Basis.EXACT, f"{around.fault[0]}: {around.fault[1]}")
    if any(around.outputs[name].tobytes() != values.tobytes() for name, values in first.items()):
        what = "NaN in the memory next to the inputs"
        apart = agree(subject, case, first, case, around.outputs, what=what)
        if apart.verdict is not Verdict.PASS:
            return apart
    second = observe(subject, other)
    inside = {name: pick(values) for name, values in observe(subject, wider).items()}
    what = "a call with other content after one of the same shapes, and the same content in a larger call"
    judged = [agree(subject, other, second, other, inside, what=what)]
    again = observe(subject, case)
    judged += [
        all_bits(first[name], again[name], what="a second call with the same inputs") for name in first if name in again
    ]
    return next((j for j in judged if j.verdict is not Verdict.PASS), judged[-1])


def all_bits(first: StoredArray, second: StoredArray, *, what: str) -> Judgement:
    """`same_bits` of every element."""
    return same_bits(first, second, np.ones((1,) * first.ndim, dtype=bool), what=what)


def kept(
    subject: Subject, gap: Float64Array, rooms: Sequence[Float64Array], *, what: str, output: str = "out"
) -> Judgement:
    """PASS if every ``gap`` is at most the room that one form of the contract leaves for it (inf: nothing is promised).

    A gap that is nan exceeds every finite room.
    """
    ratios, places = [], []
    for room in rooms:
        with np.errstate(all="ignore"):
            ratio = np.where(gap == 0, 0.0, gap / room)
        ratio = np.where(np.isnan(gap) | np.isinf(gap), np.inf, ratio)
        ratio = np.where(np.isinf(room) | np.isnan(room), 0.0, ratio)
        ratios.append(float(ratio.max(initial=0.0)))
        places.append(int(ratio.argmax()) if ratio.size else 0)
    best = next((i for i, r in enumerate(ratios) if r <= 1), int(np.argmin(ratios)))
    forms = (
        {form.label: r for form, r in zip(subject.forms, ratios, strict=True)}
        if len(ratios) == len(subject.forms)
        else {}
    )
    if ratios[best] <= 1:
        return Judgement(
            Verdict.PASS,
            Basis.DERIVED,
            f"{what}: {ratios[best]:.3g} of what the bounds allow",
            ratios[best],
            forms=forms,
        )
    at = [int(i) for i in np.unravel_index(places[best], gap.shape)]
    detail = f"{what}: off by {ratios[best]:.3g} times what the bounds allow, first at {at}"
    worst = {"output": output, "index": at, "gap": float(gap.reshape(-1)[places[best]]).hex()}
    return Judgement(Verdict.FAIL, Basis.DERIVED, detail, ratios[best], forms=forms, worst=worst)
