"""Verdicts, what they rest on, and the exit code that a run's verdicts give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What one examination of one case concluded."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"
    UNSUPPORTED = "UNSUPPORTED"
    ERROR = "ERROR"
    EXEMPT = "EXEMPT"
    VACUOUS = "VACUOUS"
    WAIVED = "WAIVED"
    STALE_WAIVER = "STALE_WAIVER"


class Basis(StrEnum):
    """What a verdict rests on: a derived bound (G0, G1), a calibrated threshold (G2, G3) or an exact property."""

    DERIVED = "derived"
    CALIBRATED = "calibrated"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of one check on one case.

    ratio: worst |error| / bound over what was compared, None where the property has no bound. detail: one sentence
    saying what was found. metrics: JSON-ready figures. forms: worst ratio under each legal form of the contract.
    worst: where and what the worst element is (JSON-ready, exact values as hex).
    """

    verdict: Verdict
    basis: Basis
    detail: str = ""
    ratio: float | None = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    forms: Mapping[str, float] = field(default_factory=dict)
    worst: Mapping[str, object] = field(default_factory=dict)


BAD = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.STALE_WAIVER})


def exit_code(verdicts: Iterable[str]) -> int:
    """0 all well; 1 any FAIL, ERROR or STALE_WAIVER; 3 any UNDECIDED or nothing checked (wrong use is 2, faults are
    3)."""
    seen = {Verdict(v) for v in verdicts}
    if seen & BAD:
        return 1
    if Verdict.UNDECIDED in seen or not seen & {Verdict.PASS, Verdict.WAIVED, Verdict.EXEMPT}:
        return 3
    return 0


def worst_of(judgements: Iterable[Judgement]) -> Judgement:
    """The gravest of several judgements of one case, the largest ratio among equals."""
    order = [
        Verdict.PASS,
        Verdict.EXEMPT,
        Verdict.VACUOUS,
        Verdict.UNSUPPORTED,
        Verdict.UNDECIDED,
        Verdict.FAIL,
        Verdict.ERROR,
    ]
    return max(judgements, key=lambda j: (order.index(j.verdict), j.ratio if j.ratio is not None else -1.0))
