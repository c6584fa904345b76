"""What a failing case looks like: which single defect explains every judged element, else where the output is wrong.

The target is called again on the failing case, and the counterfactuals of its op (`table_of`) are tried in the order of
their table, what changes the exact value before what only rounds more. One is claimed, as "as if ...", only if

- it fits every judged element of every output, within the bound of the target's own contract;
- it fits what the target gives for fresh numbers in the same shapes and options, too;
- it tells: on one of these outputs it differs from the exact result by more than both bounds, or explains the bits.

Of several, those are preferred that explain a larger case as well, then the first. Where nothing is claimed, the place
is stated (`properties.diagnosis.where`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import format_of
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Hypothesis, Table, failing_case
from properties.diagnosis.match import Match, allowed, match
from properties.diagnosis.where import where_wrong
from properties.judge.pipeline import structure
from properties.ops.diagnoses import TABLES
from properties.subject import Subject

# Above this many (query, key) pairs over all heads, or numbers in the output, only the place is stated.
LARGEST_CASE = 2**18
FRESH = 2
# Of two explanations of one kind, a later one is taken if its squared error / bound is less than this share.
CLEARLY = 0.25
# Squared error / bound of an element that is as good as none.
NOTHING = 1e-3
# Fields of a contract that say how sums run: their roundings depend on an order.
ORDERED = {"row_sum", "accumulator"}


def table_of(op: str) -> Table:
    """The counterfactuals of ``op``; none for an op without a table of its own."""
    return TABLES.get(op, Table(()))


def diagnose(subject: Subject, case: Case, *, seconds: float = 4.0, known: Sequence[str] = ()) -> str:
    """One line: "as if ...", else where the output is wrong; empty if it is within its bound, here and on related ones.

    ``seconds`` of processor time: after them no further counterfactual is tried. known: earlier diagnoses of the same
    target; a defect that one of them names is asked about first, whatever the time, and no other if it holds.
    """
    if not case.arrays or not table_of(subject.op).hypotheses:
        return ""
    deadline = time.process_time() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for prefix, failing in _cases(subject, case):
            if failing.broken():
                if _unsteady(failing):
                    return f"{prefix}another result in a second call"
                claim = ""
                if _size(case) <= LARGEST_CASE:
                    claim = _again(failing, known) or _claim(failing, deadline)
                return prefix + (f"as if {claim}" if claim else where_wrong(failing))
    return ""


def _cases(subject: Subject, case: Case) -> Iterator[tuple[str, FailingCase]]:
    """The case itself, then those of its relatives (V = 1 ...) on which a defect may show that the case does not."""
    for prefix, other in (("", _itself), *table_of(subject.op).related):
        made = other(subject, case)
        failing = None if made is None else _failing(subject, made)
        if failing is not None:
            yield prefix, failing


def _itself(subject: Subject, case: Case) -> Case | None:
    return case


def _failing(subject: Subject, case: Case) -> FailingCase | None:
    observed = subject.call(case)
    if structure(subject, case, observed) is not None:
        return None
    return failing_case(subject, case, observed.outputs)


def _unsteady(failing: FailingCase) -> bool:
    """Whether a second call gives what no two honest results of this case can differ by."""
    again = failing.subject.call(failing.case)
    if again.fault is not None or any(again.outputs[n].shape != v.shape for n, v in failing.outputs.items()):
        return True
    second = replace(failing, outputs=again.outputs)
    for judged in failing.blocks:
        for name, values in second.observed(judged.block).items():
            with np.errstate(all="ignore"):
                apart = np.abs(values - judged.values[name]) > 2 * judged.truth[0][name].bound
            if (apart | (np.isfinite(values) != np.isfinite(judged.values[name]))).any():
                return True
    return False


def _size(case: Case) -> int:
    op = op_named(case.op)
    read = sum(op.row_count(case, key) * op.width(case, key) for key in op.blocks(case))
    return max(read, *(int(np.prod(shape)) for shape in op.output_shapes(case).values()))


@dataclass(frozen=True, slots=True)
class _Found:
    """A counterfactual that fits the failing case."""

    hypothesis: Hypothesis
    c: Counterfactual
    match: Match

    def on(self, other: FailingCase) -> Match | None:
        """How the same defect fares on another case; None if it cannot be meant there."""
        if self.c.elsewhere is not None:
            return match(other, self.c.elsewhere(other), quick=False)
        again = next((x for x in self.hypothesis.imagine(other) if self._same(x)), None)
        return None if again is None else match(other, again, quick=False)

    def _same(self, x: Counterfactual) -> bool:
        return x.says == self.c.says and (x.fitted or x.choice == self.c.choice)


def _again(failing: FailingCase, known: Sequence[str]) -> str:
    """The defect of an earlier diagnosis, if it fits this case and its probes; empty if none does."""
    said = {text.split("as if ", 1)[1] for text in known if "as if " in text}
    if not said:
        return ""
    probes = _Probes(failing)
    for hypothesis in table_of(failing.subject.op).hypotheses:
        for c in hypothesis.imagine(failing):
            if c.sentence in said:
                fares = match(failing, c)
                if fares.fits.any() and _holds(_Found(hypothesis, c, fares), probes):
                    return c.sentence
    return ""


def _claim(failing: FailingCase, deadline: float) -> str:
    """What the counterfactual says that fits the case and its probes, the first of several; empty if none does."""
    held: list[_Found] = []
    probes = _Probes(failing)
    for hypothesis in table_of(failing.subject.op).hypotheses:
        found = []
        for c in hypothesis.imagine(failing):
            if time.process_time() > deadline:
                break
            fares = match(failing, c)
            if fares.fits.any():
                found.append(_Found(hypothesis, c, fares))
        held += [f for f in found if _holds(f, probes)]
        if any(_settles(f, probes) for f in held):
            break
    # What fits under the contract's first form comes before what needs a looser one; sorting is stable.
    held.sort(key=lambda f: int(np.argmax(f.match.fits)))
    if len(held) > 1:
        held = _preferred(held, probes)
    if not held:
        return ""
    first = _nearest([f for f in held if f.hypothesis is held[0].hypothesis]).c
    choices = list(dict.fromkeys(f.c.choice for f in held if f.c.says == first.says))
    listed = " or ".join(c for c in (", ".join(choices[:-1]), choices[-1]) if c)
    return replace(first, choice=listed).sentence


def _settles(found: _Found, probes: _Probes) -> bool:
    """Whether nothing that comes later could be preferred."""
    if found.c.fitted or not found.match.fits[0]:
        return False
    matches = (found.on(probe) for probe in probes.wider() if probe.broken())
    return all(m is not None and m.fits.any() for m in matches)


def _nearest(alike: list[_Found]) -> _Found:
    """The first of one kind, unless another comes much nearer to what was observed."""
    best, first = min(alike, key=lambda f: f.match.residual), alike[0]
    clear = first.match.residual > NOTHING * first.match.judged and best.match.residual < CLEARLY * first.match.residual
    return best if clear else first


class _Probes:
    """Further calls of the target, made when they are asked for: fresh numbers, large scores, more rows and keys."""

    def __init__(self, failing: FailingCase) -> None:
        self._failing = failing
        self._table = table_of(failing.subject.op)
        self._kept: dict[str, list[FailingCase]] = {}

    def _cases(self, name: str, cases: Callable[[], Iterable[Case]]) -> list[FailingCase]:
        if name not in self._kept:
            looked = (_failing(self._failing.subject, case) for case in cases())
            self._kept[name] = [failing for failing in looked if failing is not None]
        return self._kept[name]

    def fresh(self) -> list[FailingCase]:
        return self._cases("fresh", lambda: [fresh_numbers(self._failing.case, i) for i in range(FRESH)])

    def ranges(self) -> list[FailingCase]:
        return self._cases("ranges", lambda: self._table.ranges(self._failing.case))

    def wider(self) -> list[FailingCase]:
        return self._cases("wider", lambda: self._table.wider(self._failing.case))


def _holds(found: _Found, probes: _Probes) -> bool:
    """Whether it fits fresh numbers in the same shapes as well, and tells somewhere."""
    alive, tells = found.match.fits.copy(), found.match.convinces()
    if found.c.fitted and not any(probe.broken() for probe in probes.fresh()):
        # Numbers read off one output fit a single accident as well as a rule.
        return False
    for probe in probes.fresh() + (probes.ranges() if found.hypothesis.ranged else []):
        fares = found.on(probe)
        if fares is None:
            # A defect at some numbers only: others need not show it, but then they must be right.
            if probe.broken():
                return False
            continue
        alive &= fares.fits | _excused(found, probe, fares)
        if not alive.any():
            return False
        tells = tells | fares.convinces()
    return bool((alive & tells).any()) or any(_convinces_on(found, probe, alive) for probe in probes.wider())


def _excused(found: _Found, probe: FailingCase, fares: Match) -> bool:
    """The order of the target's sums is not known: elsewhere a narrow sum must allow it, and err as much."""
    contract = found.c.contract
    if contract is None or (contract and not (ORDERED & set(contract) and fares.of_one_size())):
        return False
    return allowed(probe, found.c, fares)


def _convinces_on(found: _Found, probe: FailingCase, alive: NDArray[np.bool_]) -> bool:
    fares = found.on(probe)
    return fares is not None and bool((fares.fits & alive & fares.convinces()).any())


def _preferred(held: list[_Found], probes: _Probes) -> list[_Found]:
    """Those that also explain a larger case, where it is wrong too; what is read off anew there comes second."""
    for probe in probes.wider():
        if probe.broken():
            matches = [(f, f.on(probe)) for f in held]
            strict = [f for f, m in matches if m is not None and m.fits.any()]
            loose = [f for f, m in matches if m is not None and _excused(f, probe, m)]
            held = [f for f in strict if not f.c.fitted] or loose or strict or held
    return held


def fresh_numbers(case: Case, seed: int) -> Case:
    """The case with standard normal numbers in its floating-point inputs; rotation tables and -inf entries stay.

    Weights keep the size of what they are given; the y of a softmax is one.
    """
    rng = np.random.default_rng([seed, 77])
    arrays = {}
    for name, array in case.arrays.items():
        if array.dtype.kind in "iu" or name in ("cos", "sin"):
            continue
        drawn = rng.standard_normal(array.shape)
        if case.op in ("softmax", "log_softmax", "logsumexp"):
            drawn = np.where(np.isneginf(array.astype(np.float64)), -np.inf, drawn)
        elif name.startswith("w_"):
            drawn = drawn / np.sqrt(array.shape[-1])
        elif case.op == "softmax_backward" and name == "y":
            drawn = np.exp(drawn) / np.exp(drawn).sum(axis=-1, keepdims=True)
        arrays[name] = format_of(array).store(drawn)
    return case.with_arrays(**arrays)
