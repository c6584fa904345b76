"""The spine: call the target, enclose the exact result, measure the error, judge it against the bound.

`certify` is that sentence as a function, and most properties end in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.error import summarise
from oracle.evaluate import PRECISIONS
from oracle.formats import EIGHT_BITS, Float64Array
from oracle.ops.contracts import declared_forms
from oracle.ops.table import op_named
from properties.judge.remembered import judged
from properties.judge.vacuity import trivially_accepted
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.judge.weigh import Weighed, first_kept, weigh_all
from properties.subject import Subject
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
        if name not in shapes:
            return Judgement(Verdict.ERROR, Basis.EXACT, f"{name} was returned, which this case does not have")
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


def conclude(subject: Subject, case: Case, weighed: Weighed, forms: Sequence[Contract], lower: Any) -> Judgement:
    """One judgement from all blocks: the contract is kept if one form is kept by all of them."""
    least, most, broken = weighed.least.max(axis=1), weighed.most.max(axis=1), weighed.convention
    best = first_kept(most)
    by_form = {form.label: float(ratio) for form, ratio in zip(forms, most, strict=True)}
    metrics = _metrics(weighed, best)
    worst = metrics.pop("worst", {})
    compared = sum(int(pool.errors.counted.sum()) for pool in weighed.pools.values())
    common: dict[str, Any] = {"ratio": float(most[best]), "metrics": metrics, "forms": by_form, "worst": worst}
    if broken:
        return Judgement(Verdict.FAIL, Basis.EXACT, broken, **common)
    if most.min() <= 1:
        if not compared or (weighed.exempt and weighed.exempt >= compared):
            return Judgement(
                Verdict.EXEMPT, Basis.DERIVED, "no element to which the contract promises a finite value", **common
            )
        accepted = trivially_accepted(case, weighed, best)
        if accepted:
            return Judgement(Verdict.VACUOUS, Basis.DERIVED, f"the bound would also accept {accepted}", **common)
        return Judgement(Verdict.PASS, Basis.DERIVED, f"within the {forms[best].label} form's bound", **common)
    if least.min() > 1:
        common["ratio"] = float(least.min())
        kept = lower(subject.lower_presets())
        broken_by = _broken(forms, list(weighed.pools), weighed.least)
        detail = f"error is {least.min():.3g} times the bound of contract {forms[0].preset} ({broken_by})"
        detail += f"; it keeps {kept}" if kept else "; it keeps no lower preset of the ladder"
        return Judgement(Verdict.FAIL, Basis.DERIVED, detail, **common)
    return Judgement(Verdict.UNDECIDED, Basis.DERIVED, f"undecided at {PRECISIONS[-1]} bits", **common)


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
        if weigh_all(subject, case, observed, forms, outputs).most.max(axis=1).min() <= 1:
            return preset
    return ""


def _metrics(weighed: Weighed, form: int) -> dict[str, object]:
    result: dict[str, object] = {"exempt": weighed.exempt}
    places = []
    for name, pool in weighed.pools.items():
        pooled = summarise([(pool.errors, pool.bounds[form], None)]).as_dict()
        place = pooled.pop("worst", None)
        result[name] = pooled
        if place is not None:
            place.pop("part")
            row, column = place["index"]
            index, row = pool.place(row)
            block = weighed.blocks[index]
            place["index"] = [*block.index, int(block.rows[row]), column]
            places.append((float(pooled["bound_ratio"] or 0.0), {"output": name, **place}))
    if places:
        result["worst"] = max(places, key=lambda pair: pair[0])[1]
    return result
