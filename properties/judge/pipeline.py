"""The spine: call the target, enclose the exact result, measure the error, judge it against the bound.

`certify` is that sentence as a function, and most properties end in it. The decision per element is three-way: PASS if
|error| + radius <= bound, FAIL if |error| - radius > bound, else the oracle is made more precise until it can tell,
or UNDECIDED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block, Rows
from oracle.bounds.bounded import Bounded
from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.error import Errors, measure, summarise
from oracle.evaluate import PRECISIONS, enclose, refine
from oracle.formats import EIGHT_BITS, Float64Array, format_of
from oracle.ops.contracts import declared_forms
from oracle.ops.table import op_named
from properties.judge.empty_rows import empty_rows
from properties.judge.remembered import bounded, judged
from properties.judge.vacuity import trivially_accepted
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Subject, sampled_rows
from targets.calling.target import Observed


def certify(subject: Subject, case: Case, *, outputs: Sequence[str] = (), forms: Sequence[Contract] = ()) -> Judgement:
    """Gates G0, G1 and G6 on one case: is every output (or those named) within the bound that the contract gives?"""
    observed = subject.call(case)
    wrong = structure(subject, case, observed)
    if wrong is not None:
        return wrong
    held, outputs = tuple(forms) or subject.forms, tuple(outputs) or op_named(case.op).outputs

    def make() -> Judgement:
        weighed = weigh_all(subject, case, observed, held, outputs)
        return conclude(subject, case, weighed, held, lambda presets: _lower(subject, case, observed, presets, outputs))

    return judged("certify", subject, [(case, observed.outputs)], make, words=outputs, forms=held)


def weigh_all(
    subject: Subject, case: Case, observed: Observed, forms: Sequence[Contract], outputs: Sequence[str]
) -> list[Weighed]:
    """`weigh` of every block of which some output was asked for and given."""
    given = {n: v for n, v in observed.outputs.items() if n in outputs}
    formats = {n: format_of(v) for n, v in given.items()}
    rows = rows_to_certify(case)
    return [
        weigh(subject, case, block, given, forms, bounded(case, rows, block, forms, formats))
        for block in enclose(case, rows=rows)
        if any(block.holds(n) for n in given)
    ]


def rows_to_certify(case: Case) -> dict[tuple[int, ...], Rows]:
    """The rows sampled of each block (head) that is not certified in full."""
    op = op_named(case.op)
    keys = op.blocks(case)
    rows = {key: sampled_rows(op.row_count(case, key), op.width(case, key), len(keys)) for key in keys}
    return {key: chosen for key, chosen in rows.items() if chosen is not None}


def exact_blocks(case: Case) -> list[Block]:
    """Enclosures of the rows to certify, every block (head) of the case covered."""
    return enclose(case, rows=rows_to_certify(case))


def structure(subject: Subject, case: Case, observed: Observed) -> Judgement | None:
    """Gate G0: did the call work, with the shapes and dtypes of its op, leaving its inputs alone? None if so."""
    if observed.fault is not None:
        kind, text = observed.fault
        if kind == "raised" and text.startswith("NotImplementedError"):
            return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, text)
        verdict = Verdict.FAIL if kind in ("mutated", "aliased") else Verdict.ERROR
        return Judgement(verdict, Basis.EXACT, f"{kind}: {text}")
    op = op_named(case.op)
    shapes = op.output_shapes(case)
    for name, value in observed.outputs.items():
        if tuple(value.shape) != shapes[name]:
            return Judgement(
                Verdict.FAIL, Basis.EXACT, f"{name} has shape {list(value.shape)}, expected {list(shapes[name])}"
            )
    expected = np.dtype(subject.output.dtype)
    # The gradient of an option has the option's own dtype.
    options = {} if op.gradient is None else {output: option for option, output in op.gradient.options.items()}
    for name in op.required_outputs(case):
        if name not in observed.outputs:
            return Judgement(Verdict.FAIL, Basis.EXACT, f"no {name} was returned")
        given, option = observed.outputs[name].dtype, options.get(name)
        wanted = expected if option is None else case.options[option].dtype
        if given != wanted:
            hint = "; the contract's `output` says which" if subject.dtype in EIGHT_BITS else ""
            return Judgement(Verdict.FAIL, Basis.EXACT, f"{name} has dtype {given}, expected {wanted}{hint}")
    out = observed.outputs[op.outputs[0]]
    if "lse" in observed.outputs and observed.outputs["lse"].dtype not in (np.float32, np.float64, out.dtype):
        return Judgement(Verdict.FAIL, Basis.EXACT, f"lse has dtype {observed.outputs['lse'].dtype}, expected float32")
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """One block judged: per form and output the largest ratio surely reached (``least``) and possibly reached
    (``most``)."""

    block: Block
    least: NDArray[np.float64]
    most: NDArray[np.float64]
    errors: Mapping[str, Errors]
    bounds: Sequence[Mapping[str, Bounded]]
    exempt: int
    convention: str


def weigh(
    subject: Subject,
    case: Case,
    block: Block,
    outputs: Mapping[str, NDArray[Any]],
    forms: Sequence[Contract],
    bounds: Sequence[Mapping[str, Bounded]],
) -> Weighed:
    """Errors of one block against each form's bound, with the oracle made precise enough to decide.

    bounds: those of the block as it is, by form; of a more precise one they are formed anew.
    """
    values = {n: block.take(n, v) for n, v in outputs.items() if block.holds(n)}
    formats = {n: format_of(v) for n, v in values.items()}
    convention = empty_rows(subject, case, block, values)
    live = ~(block.empty | block.undefined)
    for step, precision in enumerate((*PRECISIONS, None)):
        found = {n: measure(v, _times(block.part(n), subject.nat(n)), formats[n]) for n, v in values.items()}
        least, most, unsure, exempt = _ratios(found, bounds, live, subject, first=step == 0)
        if precision is None or not unsure.any():
            break
        block = refine(case, block, unsure, precision)
        bounds = bounds_of(case.op)(case, block, forms, formats)
    counted = {n: _only(errors, live) for n, errors in found.items()}
    return Weighed(block, least, most, counted, bounds, exempt, convention)


def _ratios(
    found: Mapping[str, Errors],
    by_form: Sequence[Mapping[str, Bounded]],
    live: NDArray[np.bool_],
    subject: Subject,
    *,
    first: bool,
) -> tuple[Float64Array, Float64Array, NDArray[np.bool_], int]:
    """(least, most) ratio [form, output] over live elements; rows still undecided; elements exempt under the first
    form."""
    least, most = np.zeros((len(by_form), len(found))), np.zeros((len(by_form), len(found)))
    straddling = np.zeros((len(by_form), len(live)), dtype=bool)
    coarse = np.zeros(len(live), dtype=bool)
    exempt = 0
    for index, bounds in enumerate(by_form):
        for place, (name, errors) in enumerate(found.items()):
            bound = bounds[name].bound * subject.nat(name)
            legal = bounds[name].may_overflow & ~errors.finite
            use = live[:, None] & ~legal
            low, high = _interval(errors, bound)
            low, high = np.where(use, low, 0.0), np.where(use, high, 0.0)
            least[index, place] = float(low.max(initial=0.0))
            most[index, place] = float(high.max(initial=0.0))
            straddling[index] |= ((low <= 1) & (high > 1)).any(axis=1)
            if index == 0:
                coarse |= (use & errors.finite & (errors.radius > bound / 100)).any(axis=1)
                exempt += int((legal & live[:, None]).sum())
    # Only the first form that may be kept needs an answer; the first question asked of the oracle is a hundredth of
    # the bound.
    unsure = straddling[_first_kept(least.max(axis=1))]
    return least, most, unsure | coarse if first else unsure, exempt


def _first_kept(ratios: Float64Array) -> int:
    """The first form whose ratio is at most 1, else the one nearest to it."""
    kept = np.flatnonzero(ratios <= 1)
    return int(kept[0]) if len(kept) else int(np.argmin(ratios))


def _interval(errors: Errors, bound: Float64Array) -> tuple[Float64Array, Float64Array]:
    """(least, most) of |error| / bound; 0 / 0 is 0, a non-finite observation is inf, an unbounded enclosure (0,
    inf)."""
    with np.errstate(all="ignore"):
        low = np.where(errors.absolute > errors.radius, (errors.absolute - errors.radius) / bound, 0.0)
        high = np.where(errors.absolute + errors.radius > 0, (errors.absolute + errors.radius) / bound, 0.0)
    low = np.where(errors.finite, np.where(np.isnan(low), 0.0, low), np.inf)
    high = np.where(errors.finite & ~np.isnan(high), high, np.inf)
    return np.where(errors.decided | ~errors.finite, low, 0.0), np.where(errors.decided, high, np.inf)


def _times(exact: Enclosure, unit: float) -> Enclosure:
    """The enclosure in another unit."""
    if unit == 1:
        return exact
    hi = exact.hi * unit
    return Enclosure(hi, exact.lo * unit, exact.rad * unit + np.abs(hi) * 2.0**-51)


def _only(errors: Errors, live: NDArray[np.bool_]) -> Errors:
    return replace(errors, counted=errors.counted & live[:, None])


def conclude(subject: Subject, case: Case, weighed: list[Weighed], forms: Sequence[Contract], lower: Any) -> Judgement:
    """One judgement from all blocks: the contract is kept if one form is kept by all of them."""
    names = list(dict.fromkeys(n for w in weighed for n in w.errors))
    least_by_output, most_by_output = (_by_output(weighed, names, pick) for pick in (_least, _most))
    least, most = least_by_output.max(axis=1), most_by_output.max(axis=1)
    best = _first_kept(most)
    by_form = {form.label: float(ratio) for form, ratio in zip(forms, most, strict=True)}
    exempt = sum(w.exempt for w in weighed)
    metrics = _metrics(weighed, best, exempt)
    worst = metrics.pop("worst", {})
    compared = sum(int(e.counted.sum()) for w in weighed for e in w.errors.values())
    broken = next((w.convention for w in weighed if w.convention), "")
    common: dict[str, Any] = {"ratio": float(most[best]), "metrics": metrics, "forms": by_form, "worst": worst}
    if broken:
        return Judgement(Verdict.FAIL, Basis.EXACT, broken, **common)
    if most.min() <= 1:
        if not compared or (exempt and exempt >= compared):
            return Judgement(
                Verdict.EXEMPT, Basis.DERIVED, "no element to which the contract promises a finite value", **common
            )
        accepted = trivially_accepted(case, [(w.block, w.errors, w.bounds[best]) for w in weighed])
        if accepted:
            return Judgement(Verdict.VACUOUS, Basis.DERIVED, f"the bound would also accept {accepted}", **common)
        return Judgement(Verdict.PASS, Basis.DERIVED, f"within the {forms[best].label} form's bound", **common)
    if least.min() > 1:
        common["ratio"] = float(least.min())
        kept = lower(subject.lower_presets())
        broken_by = _broken(forms, names, least_by_output)
        detail = f"error is {least.min():.3g} times the bound of contract {forms[0].preset} ({broken_by})"
        detail += f"; it keeps {kept}" if kept else "; it keeps no lower preset of the ladder"
        return Judgement(Verdict.FAIL, Basis.DERIVED, detail, **common)
    return Judgement(Verdict.UNDECIDED, Basis.DERIVED, f"undecided at {PRECISIONS[-1]} bits", **common)


def _least(weighed: Weighed) -> Float64Array:
    return weighed.least


def _most(weighed: Weighed) -> Float64Array:
    return weighed.most


def _by_output(weighed: list[Weighed], names: Sequence[str], pick: Callable[[Weighed], Float64Array]) -> Float64Array:
    """[form, output]: the largest over the blocks that are a part of the output."""
    columns = []
    for name in names:
        held = [pick(w)[:, list(w.errors).index(name)] for w in weighed if name in w.errors]
        columns.append(np.max(held, axis=0))
    return np.stack(columns, axis=1)


def _broken(forms: Sequence[Contract], names: Sequence[str], least: Float64Array) -> str:
    """Which output breaks which form: "out in every form", or "lse in the plain form, out in the rounded row sum
    form"."""
    places: dict[str, list[str]] = {}
    for form, row in zip(forms, least, strict=True):
        for name, ratio in zip(names, row, strict=True):
            if ratio > 1:
                places.setdefault(name, []).append(form.label)
    if len(forms) == 1:
        return " and ".join(places)
    return ", ".join(
        f"{name} in every form" if len(labels) == len(forms) else f"{name} in the {', '.join(labels)} form"
        for name, labels in places.items()
    )


def _lower(subject: Subject, case: Case, observed: Observed, presets: Sequence[str], outputs: Sequence[str]) -> str:
    """The strictest of ``presets`` that this case keeps, or an empty string."""
    for preset in presets:
        forms = declared_forms(case.op, preset, subject.dtype)
        most = [w.most.max(axis=1) for w in weigh_all(subject, case, observed, forms, outputs)]
        if np.max(most, axis=0).min() <= 1:
            return preset
    return ""


def _metrics(weighed: list[Weighed], form: int, exempt: int) -> dict[str, Any]:
    result: dict[str, Any] = {"exempt": exempt}
    places = []
    for name in dict.fromkeys(n for w in weighed for n in w.errors):
        held = [w for w in weighed if name in w.errors]
        parts = [(w.errors[name], w.bounds[form][name].bound, None) for w in held]
        pooled = summarise(parts).as_dict()
        place = pooled.pop("worst", None)
        result[name] = pooled
        if place is not None:
            block = held[place.pop("part")].block
            row, column = place["index"]
            place["index"] = [*block.index, int(block.rows[row]), column]
            places.append((float(pooled["bound_ratio"] or 0.0), {"output": name, **place}))
    if places:
        result["worst"] = max(places, key=lambda pair: pair[0])[1]
    return result
