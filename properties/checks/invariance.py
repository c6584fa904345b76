"""Does a result depend on what is computed beside it? Bit-equal, or reported as not invariant and then within bounds.

A target that states the convention ``batch_invariant: yes`` must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.formats import StoredArray
from properties.checks.metamorphic import Outputs, same_bits
from properties.judge.verdict import Basis, Judgement, Verdict
from properties.subject import Subject

NOT_INVARIANT = "not batch-invariant"


def with_parameters(subject: Subject, **given: object) -> Subject:
    """The subject of a target of which some parameters beside its op's options are set: those of ``given`` it has."""
    own = {name: subject.target.parameters.get(name) for name in given}
    fixed = {str(own[name]): value for name, value in given.items() if own[name] is not None}
    function = subject.target.function

    def fixing(*positional: object, **keyword: object) -> object:
        return function(*positional, **{**keyword, **fixed})

    return replace(subject, target=replace(subject.target, function=fixing))


def everywhere(array: StoredArray) -> NDArray[np.bool_]:
    return np.ones((1,) * array.ndim, dtype=bool)


def equal_bits(first: Outputs, second: Outputs, *, what: str) -> Judgement:
    """PASS if every output has the same bits in both."""
    judged = [same_bits(first[n], second[n], everywhere(first[n]), what=what) for n in first if n in second]
    return next((j for j in judged if j.verdict is not Verdict.PASS), judged[0])


def invariant(
    subject: Subject, first: Outputs, second: Outputs, within: Callable[[], Judgement], *, what: str
) -> Judgement:
    """The same bits, or else what ``within`` says about the difference."""
    bits = equal_bits(first, second, what=what)
    if bits.verdict is Verdict.PASS:
        return replace(bits, metrics={**bits.metrics, "batch_invariant": 1.0})
    if subject.conventions.get("batch_invariant") == "yes":
        return replace(bits, detail=f"{bits.detail}; batch invariance is declared")
    judged = within()
    if judged.verdict is not Verdict.PASS:
        return judged
    detail = f"{NOT_INVARIANT}: {bits.detail}; {judged.detail}"
    return Judgement(Verdict.PASS, Basis.DERIVED, detail, judged.ratio, {"batch_invariant": 0.0}, judged.forms)
