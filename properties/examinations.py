"""Which questions a run asks, of whom and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from oracle.case import load_case
from properties.order import Part, parts
from targets.calling.gradient import with_gradients
from targets.calling.registry import BUILTINS, Unavailable, UnknownTarget, load_builtin, resolve_all
from targets.calling.target import BadTarget, Target


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target at one dtype."""

    target: Target
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.target.name}-{self.dtype}"


@dataclass(frozen=True, slots=True)
class Examination:
    """One parameter of the suite: a property of one target at one dtype, or a part of its inputs."""

    target: Target
    dtype: str
    part: Part

    @property
    def label(self) -> str:
        return f"{self.target.name}-{self.dtype}-{self.part.prop.id}"


def chosen_targets(config: pytest.Config) -> list[Target]:
    """The targets asked for, else every built-in that can run here. Usage errors end the session with exit code 4."""
    op, device = config.getoption("--op"), config.getoption("--device").partition(":")[0]
    try:
        if config.getoption("--target"):
            found = resolve_all(config.getoption("--target"), op=op)
            saved = config.getoption("--case")
            return found if saved is None else [t for t in found if t.op == load_case(saved).op]
        found = []
        for builtin in BUILTINS:
            if builtin.by_name:
                continue
            try:
                found.append(load_builtin(builtin))
            except Unavailable:
                continue
        return [t for t in with_gradients(found, op=op) if device in t.devices]
    except (UnknownTarget, BadTarget, Unavailable) as error:
        raise pytest.UsageError(str(error)) from error


def chosen_dtypes(target: Target, asked: list[str]) -> tuple[str, ...]:
    """The dtypes at which to examine a target: those asked for that its op and itself take."""
    known = [d for d in asked or target.dtypes if d in target.row.formats]
    return tuple(d for d in known if "dtypes" not in target.stated or d in target.dtypes)


def candidates(config: pytest.Config, found: Sequence[Target]) -> list[Candidate]:
    """Each target at each of its dtypes."""
    labels = config.getoption("--only")
    made = [Candidate(t, dtype) for t in found for dtype in chosen_dtypes(t, config.getoption("--dtype"))]
    return [c for c in made if not labels or any(label.startswith(c.label + "-") for label in labels)]


def examinations(config: pytest.Config, found: Sequence[Target]) -> list[Examination]:
    """The questions of a run in the order in which they are asked: each in all dtypes before the next."""
    ids, labels = set(config.getoption("--property")), set(config.getoption("--only"))
    asked = [
        Examination(target, c.dtype, part)
        for target in found
        for part in parts(target.op, lambda prop: not ids or prop.id in ids)
        for c in candidates(config, [target])
        # A saved case is no edge input.
        if config.getoption("--case") is None or not part.first
    ]
    # A label without a property stands for all of them.
    return [e for e in asked if not labels or {e.label, f"{e.target.name}-{e.dtype}-"} & labels]
