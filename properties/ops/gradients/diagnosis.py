"""What wrong gradients look like: which single defect of a backward pass explains every element of them.

Each hypothesis is the whole backward pass in float64 with one step changed. One is claimed if it fits every output of
the failing case and of a case of fresh numbers, within the contract's own bound and the rounding of what the defect
adds. Where none fits, the outputs and rows that are wrong are named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import format_of
from oracle.ops.table import op_named
from properties.diagnosis.match import LEAST_CORRELATION, LEAST_ERRORS, SLOPES
from properties.ops.gradients.backward_pass import Outputs, Pass, computed
from properties.ops.gradients.defects import hypotheses, stages
from properties.subject import Subject

# Of what a defect adds to a gradient, in unit roundoffs of the output: its own stages round too.
ROUNDINGS = 16


def explain(subject: Subject, case: Case, fresh: Case, *, seconds: float = 4.0) -> str:
    """One line: "as if ...", else where the gradients are wrong; empty if they are within their bounds.

    fresh: other numbers in the same shapes and options.
    """
    deadline = time.process_time() + seconds
    scene = _scene(subject, case)
    if scene is None or not any(mask.any() for mask in scene.wrong.values()):
        return ""
    if _unsteady(scene, _observed(subject, case)):
        return "another result in a second call"
    other = _scene(subject, fresh)
    for says, made in hypotheses(subject, case):
        if time.process_time() > deadline:
            break
        if _fits(scene, made(case), tells=True) and (other is None or _fits(other, made(fresh), tells=False)):
            return f"as if {says}"
    for says, made in stages(case):
        if time.process_time() > deadline:
            break
        if _alike(scene, made(case)) and (other is None or _near(other, made(fresh))):
            return f"as if {says}"
    return _where(scene.wrong)


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """A case, what was observed of it, the exact gradients in float64, and per output the wrong elements and bounds."""

    case: Case
    seen: Outputs
    exact: Outputs
    wrong: Mapping[str, NDArray[np.bool_]]
    rooms: Outputs


def _scene(subject: Subject, case: Case) -> _Scene | None:
    seen = _observed(subject, case)
    return None if seen is None else _Scene(case, seen, computed(case, Pass()), *_wrong(subject, case, seen))


def _observed(subject: Subject, case: Case) -> Outputs | None:
    observed = subject.call(case)
    if observed.fault is not None:
        return None
    shapes = op_named(case.op).output_shapes(case)
    given = {n: v for n, v in observed.outputs.items() if v.shape == shapes.get(n)}
    return {n: v.astype(np.float64) for n, v in given.items()} or None


def _wrong(subject: Subject, case: Case, seen: Outputs) -> tuple[dict[str, NDArray[np.bool_]], Outputs]:
    """Per output: which elements break every form of the contract, and the widest bound."""
    rooms = {n: np.zeros(v.shape) for n, v in seen.items()}
    masks = {n: np.zeros(v.shape, dtype=bool) for n, v in seen.items()}
    for block in enclose(case):
        held = [n for n in seen if block.holds(n)]
        if not held:
            continue
        bounded = bounds_of(case.op)(case, block, subject.forms, dict.fromkeys(held, subject.fmt))
        for name in held:
            exact, y = block.part(name), block.take(name, seen[name])
            room = np.max([b[name].bound for b in bounded], axis=0)
            with np.errstate(all="ignore"):
                bad = ~(exact.distance(y) - exact.rad <= room) & ~(block.empty | block.undefined)[:, None]
            for array, values in ((rooms[name], room), (masks[name], bad)):
                whole = block.whole(name, array)
                whole[block.rows] = np.broadcast_to(values, whole[block.rows].shape)
    return masks, rooms


def _unsteady(scene: _Scene, again: Outputs | None) -> bool:
    """Whether a second call gives what no two honest results can differ by."""
    if again is None:
        return True
    with np.errstate(all="ignore"):
        apart = {n: np.abs(again[n] - seen) > 2 * scene.rooms[n] for n, seen in scene.seen.items()}
    return any(bool(mask.any()) for mask in apart.values())


def _fits(scene: _Scene, predicted: Outputs, *, tells: bool) -> bool:
    """Whether the prediction explains every output that was seen; ``tells``: and differs, where one is wrong, from the
    exact gradient by more than both may err."""
    unit, told = format_of(next(iter(scene.case.arrays.values()))).unit_roundoff, not tells
    for name, seen in scene.seen.items():
        there = predicted.get(name)
        if there is None:
            return False
        finite = np.isfinite(there)
        moved = np.where(finite, np.abs(there - scene.exact[name]), 0.0)
        slack = scene.rooms[name] + ROUNDINGS * unit * (moved + moved.max(initial=0.0) / 4)
        with np.errstate(all="ignore"):
            if not np.all(np.where(finite, np.abs(seen - there) <= slack, ~np.isfinite(seen))):
                return False
            told |= bool((scene.wrong[name] & ((moved > scene.rooms[name] + slack) | ~finite)).any())
    return told


def _alike(scene: _Scene, predicted: Outputs) -> bool:
    """Whether errors beyond the bound follow those of a simulated stage, and none is larger elsewhere."""
    for name, mask in scene.wrong.items():
        observed, simulated = scene.seen[name] - scene.exact[name], predicted[name] - scene.exact[name]
        ok = mask & np.isfinite(observed) & np.isfinite(simulated)
        if (np.isfinite(scene.seen[name]) != np.isfinite(predicted[name])).any():
            return False
        if not mask.any():
            continue
        a, b = observed[ok], simulated[ok]
        both, size = float(a @ b), float(b @ b)
        if np.count_nonzero(b) < LEAST_ERRORS or both < LEAST_CORRELATION * float(np.linalg.norm(a)) * size**0.5:
            return False
        if not SLOPES[0] <= both / size <= SLOPES[1]:
            return False
    return _near(scene, predicted)


def _near(scene: _Scene, predicted: Outputs) -> bool:
    """Whether nothing is further from the exact gradient than the largest simulated error and the bound."""
    with np.errstate(all="ignore"):
        moved = {n: np.abs(predicted[n] - exact) for n, exact in scene.exact.items() if n in scene.seen}
        reach = {n: np.max(m, initial=0.0, where=np.isfinite(m)) for n, m in moved.items()}
        far = {n: np.abs(v - scene.exact[n]) > scene.rooms[n] + 2 * reach[n] for n, v in scene.seen.items()}
    return not any(bool(mask.any()) for mask in far.values())


def _where(wrong: Mapping[str, NDArray[np.bool_]]) -> str:
    """Which outputs are wrong, and in which rows where that is not all of them."""
    said = []
    for name, mask in wrong.items():
        if not mask.any():
            continue
        rows = mask.any(axis=-1) if mask.ndim > 1 else mask
        rows = rows.reshape(-1, rows.shape[-1]).any(axis=0)
        places = np.flatnonzero(rows)
        share = "all rows" if rows.all() else f"rows {places[0]} to {places[-1]}"
        said.append(f"{name} ({share if len(places) > 1 or rows.all() else f'row {places[0]}'})")
    right = [name for name, mask in wrong.items() if not mask.any()]
    return f"wrong in {', '.join(said)}" + (f"; right in {', '.join(right)}" if right else "")
