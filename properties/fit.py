"""Before anything is asked of a target: does it take an ordinary call at all, and which conventions does it follow?

What a target does not even do with the plainest inputs is said once for each dtype, not by every property.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oracle.case import Case
from oracle.ops.op import Op
from properties.judge.pipeline import structure
from properties.judge.verdict import Judgement, Verdict
from properties.subject import Subject
from targets.calling.target import Target
from targets.probing.asked import asked_of
from targets.probing.probes import contradictions, probe, returns_lse_unasked
from targets.probing.tiny import tiny_case

_EMPTY = {"nan": "NaN", "mean": "the mean of V"}
PROPERTY, TITLE = "probe", "tiny calls that find conventions"
# Lengths and widths that kernels with tiles ask for, tried in turn where the tiniest call fails.
_ORDINARY = ({"width": 16, "length": 16}, {"width": 64, "length": 64}, {"width": 128, "length": 128})


@dataclass(frozen=True, slots=True)
class Fit:
    """What a target's first calls at one dtype told.

    conventions: declared and found ones. lse_unasked: an LSE comes without a parameter for it. wrong: statements that
    the calls contradict. misfit: why nothing can be asked, empty if it can; ``verdict`` says of which kind that is.
    description: of the call that failed.
    """

    target: str
    dtype: str
    conventions: Mapping[str, str] = field(default_factory=dict)
    lse_unasked: bool = False
    wrong: tuple[str, ...] = ()
    misfit: str = ""
    verdict: str = ""
    description: str = ""

    def taken_by(self, target: Target) -> Target:
        """The target with the parameter for the LSE that it turned out not to need."""
        return replace(target, parameters={**target.parameters, "return_lse": None}) if self.lse_unasked else target


def fit(subject: Subject) -> Fit:
    """Ask a target, by some tiny calls, whether it takes any and what it does. Calls may hang or die: see `run`."""
    target, dtype, device = subject.target, subject.dtype, subject.device
    refused = _refused(subject)
    if refused is not None:
        case, judgement = refused
        why, verdict = judgement.detail, judgement.verdict.value
        return Fit(target.name, dtype, misfit=why, verdict=verdict, description=case.describe())
    unasked = returns_lse_unasked(target, dtype, device=device)
    found = Fit(target.name, dtype, lse_unasked=unasked)
    taken = found.taken_by(target)
    asked = taken if taken.forward is None else replace(taken.forward, session=taken.session)
    wrong = contradictions(asked, dtype, device=device) if asked.conventions else []
    return replace(found, conventions=probe(asked, dtype, device=device), wrong=tuple(wrong))


def _refused(subject: Subject) -> tuple[Case, Judgement] | None:
    """The plainest call with what became of it, if neither it nor any other ordinary one gave a result."""
    first: tuple[Case, Judgement] | None = None
    for case in _ordinary_cases(subject):
        wrong = structure(subject, case, subject.call(case))
        if wrong is None or wrong.verdict not in (Verdict.ERROR, Verdict.UNSUPPORTED):
            # A result of a wrong shape is one that the properties judge.
            return None
        first = first or (case, wrong)
    return first


def _ordinary_cases(subject: Subject) -> Iterator[Case]:
    op, dtype = subject.op, subject.dtype
    yield tiny_case(op, dtype, width=asked_of(subject.target, dtype, device=subject.device)[0].width)
    for size in _ORDINARY:
        yield tiny_case(op, dtype, width=size["width"], queries=size["length"], keys=size["length"])


def understood(target: Target) -> dict[str, Any]:
    """What was read from a target's parameters: its options (by its own names), what is ignored, what is lacking."""
    source = target if target.forward is None else target.forward
    options = {n: own for n, own in source.parameters.items() if n not in source.row.inputs}
    return {
        "op": target.op,
        "options": [n if own in (None, n) else f"{n} (as {own})" for n, own in options.items()],
        "ignored": _ignored(source),
        "lacking": sorted(set(source.row.parameters) - set(source.parameters)),
    }


def beyond(row: Op, conventions: Mapping[str, str]) -> list[str]:
    """What is not asked of a target with these conventions, each in words."""
    told = [f"the target refuses {x.said}" for name, x in row.limits.items() if conventions.get(name) == "refused"]
    empty = conventions.get("empty_row", "zero")
    if row.gradient is not None and empty != "zero":
        told.append(f"gradients that sum over a row without a key, which the forward pass gives {_EMPTY[empty]}")
    return told


def _ignored(target: Target) -> list[str]:
    """Parameters of the function that stand for nothing of its op, and keep their defaults."""
    try:
        given = inspect.signature(target.function).parameters.values()
    except (TypeError, ValueError):
        return []
    own = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    used = {name for name in target.parameters.values() if name is not None}
    by_position = sum(name is None for n, name in target.parameters.items() if n in target.row.inputs)
    return [name for name in own[by_position:] if name not in used]
