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

import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import format_of
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import Counterfactual, Hypothesis, Scene, Table, scene_of
from properties.diagnosis.match import Match, allowed, match
from properties.diagnosis.where import where_wrong
from properties.judge.pipeline import structure
from properties.ops.gradients import diagnosis as diagnose_backward
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
# Ops whose outputs have rows of different kinds, compared with whole backward passes.
GRADIENTS = ("attention_backward", "mla_backward")
_MODULES = {
    "attention": "properties.ops.attention.diagnosis",
    "mla": "properties.ops.mla.diagnosis",
    "rope": "properties.ops.rope.diagnosis",
    "rope_apply": "properties.ops.rope.diagnosis",
    "rope_backward": "properties.ops.rope.diagnosis",
    "softmax": "properties.ops.softmax.diagnosis",
    "log_softmax": "properties.ops.softmax.diagnosis",
    "logsumexp": "properties.ops.softmax.diagnosis",
    "softmax_backward": "properties.ops.gradients.softmax_diagnosis",
    "gqa_block": "properties.ops.blocks.diagnosis",
    "mla_block": "properties.ops.blocks.diagnosis",
    "attention_varlen": "properties.ops.layouts.diagnosis",
    "attention_paged": "properties.ops.layouts.diagnosis",
}


def table_of(op: str) -> Table:
    """The counterfactuals of ``op``; none for an op without a module of its own."""
    if op not in _MODULES:
        return Table(())
    table: Table = importlib.import_module(_MODULES[op]).TABLES[op]
    return table


def diagnose(subject: Subject, case: Case, *, seconds: float = 4.0, known: Sequence[str] = ()) -> str:
    """One line: "as if ...", else where the output is wrong; empty if it is within its bound, here and on related ones.

    ``seconds`` of processor time: after them no further counterfactual is tried. known: earlier diagnoses of the same
    target; a defect that one of them names is asked about first, whatever the time, and no other if it holds.
    """
    if subject.op in GRADIENTS:
        if not case.arrays or _size(case) > LARGEST_CASE:
            return ""
        return diagnose_backward.explain(subject, case, fresh_numbers(case, 0), seconds=seconds)
    if not case.arrays or not table_of(subject.op).hypotheses:
        return ""
    deadline = time.process_time() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for prefix, scene in _scenes(subject, case):
            if scene.broken():
                if _unsteady(scene):
                    return f"{prefix}another result in a second call"
                claim = ""
                if _size(case) <= LARGEST_CASE:
                    claim = _again(scene, known) or _claim(scene, deadline)
                return prefix + (f"as if {claim}" if claim else where_wrong(scene))
    return ""


def _scenes(subject: Subject, case: Case) -> Iterator[tuple[str, Scene]]:
    """The case itself, then those of its relatives (V = 1 ...) on which a defect may show that the case does not."""
    for prefix, other in (("", _itself), *table_of(subject.op).related):
        made = other(subject, case)
        scene = None if made is None else _look_at(subject, made)
        if scene is not None:
            yield prefix, scene


def _itself(subject: Subject, case: Case) -> Case | None:
    return case


def _look_at(subject: Subject, case: Case) -> Scene | None:
    observed = subject.call(case)
    if structure(subject, case, observed) is not None:
        return None
    return scene_of(subject, case, observed.outputs)


def _unsteady(scene: Scene) -> bool:
    """Whether a second call gives what no two honest results of this case can differ by."""
    again = scene.subject.call(scene.case)
    if again.fault is not None or any(again.outputs[n].shape != v.shape for n, v in scene.outputs.items()):
        return True
    second = replace(scene, outputs=again.outputs)
    for look in scene.looks:
        for name, values in second.observed(look.block).items():
            with np.errstate(all="ignore"):
                apart = np.abs(values - look.values[name]) > 2 * look.truth[0][name].bound
            if (apart | (np.isfinite(values) != np.isfinite(look.values[name]))).any():
                return True
    return False


def _size(case: Case) -> int:
    op = op_named(case.op)
    read = sum(op.row_count(case, key) * op.width(case, key) for key in op.blocks(case))
    return max(read, *(int(np.prod(shape)) for shape in op.output_shapes(case).values()))


@dataclass(frozen=True, slots=True)
class _Found:
    """A counterfactual that fits the scene."""

    hypothesis: Hypothesis
    c: Counterfactual
    match: Match

    def on(self, other: Scene) -> Match | None:
        """How the same defect fares on another scene; None if it cannot be meant there."""
        if self.c.elsewhere is not None:
            return match(other, self.c.elsewhere(other), quick=False)
        again = next((x for x in self.hypothesis.imagine(other) if self._same(x)), None)
        return None if again is None else match(other, again, quick=False)

    def _same(self, x: Counterfactual) -> bool:
        return x.says == self.c.says and (x.fitted or x.choice == self.c.choice)


def _again(scene: Scene, known: Sequence[str]) -> str:
    """The defect of an earlier diagnosis, if it fits this scene and its probes; empty if none does."""
    said = {text.split("as if ", 1)[1] for text in known if "as if " in text}
    if not said:
        return ""
    probes = _Probes(scene)
    for hypothesis in table_of(scene.subject.op).hypotheses:
        for c in hypothesis.imagine(scene):
            if c.sentence in said:
                fares = match(scene, c)
                if fares.fits.any() and _holds(_Found(hypothesis, c, fares), probes):
                    return c.sentence
    return ""


def _claim(scene: Scene, deadline: float) -> str:
    """What the counterfactual says that fits the scene and its probes, the first of several; empty if none does."""
    found: list[_Found] = []
    for hypothesis in table_of(scene.subject.op).hypotheses:
        for c in hypothesis.imagine(scene):
            if time.process_time() > deadline:
                break
            fares = match(scene, c)
            if fares.fits.any():
                found.append(_Found(hypothesis, c, fares))
    # What fits under the contract's first form comes before what needs a looser one; sorting is stable.
    found.sort(key=lambda f: int(np.argmax(f.match.fits)))
    probes = _Probes(scene)
    held = [f for f in found if _holds(f, probes)]
    if len(held) > 1:
        held = _preferred(held, probes)
    if not held:
        return ""
    first = _nearest([f for f in held if f.hypothesis is held[0].hypothesis]).c
    choices = list(dict.fromkeys(f.c.choice for f in held if f.c.says == first.says))
    listed = " or ".join(c for c in (", ".join(choices[:-1]), choices[-1]) if c)
    return replace(first, choice=listed).sentence


def _nearest(alike: list[_Found]) -> _Found:
    """The first of one kind, unless another comes much nearer to what was observed."""
    best, first = min(alike, key=lambda f: f.match.residual), alike[0]
    clear = first.match.residual > NOTHING * first.match.judged and best.match.residual < CLEARLY * first.match.residual
    return best if clear else first


class _Probes:
    """Further calls of the target, made when they are asked for: fresh numbers, large scores, more rows and keys."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._table = table_of(scene.subject.op)
        self._kept: dict[str, list[Scene]] = {}

    def _scenes(self, name: str, cases: Callable[[], Iterable[Case]]) -> list[Scene]:
        if name not in self._kept:
            looked = (_look_at(self._scene.subject, case) for case in cases())
            self._kept[name] = [scene for scene in looked if scene is not None]
        return self._kept[name]

    def fresh(self) -> list[Scene]:
        return self._scenes("fresh", lambda: [fresh_numbers(self._scene.case, i) for i in range(FRESH)])

    def ranges(self) -> list[Scene]:
        return self._scenes("ranges", lambda: self._table.ranges(self._scene.case))

    def wider(self) -> list[Scene]:
        return self._scenes("wider", lambda: self._table.wider(self._scene.case))


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


def _excused(found: _Found, probe: Scene, fares: Match) -> bool:
    """The order of the target's sums is not known: elsewhere a narrow sum must allow it, and err as much."""
    return bool(ORDERED & set(found.c.contract)) and fares.of_one_size() and allowed(probe, found.c)


def _convinces_on(found: _Found, probe: Scene, alive: NDArray[np.bool_]) -> bool:
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
