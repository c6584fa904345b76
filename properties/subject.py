"""A subject: one target at one dtype on one device, with its conventions and the contract it is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oracle.block import Rows
from oracle.case import Case
from oracle.contract.contract import Contract, resolved
from oracle.formats import FORMATS, Format, beside
from oracle.ops.contracts import declared_forms, ladder
from oracle.ops.table import op_named
from targets.calling.target import Observed, Target, run

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Profile:
    """How much to try. examples: a search's cases. shrink_seconds: spent on shrinking a failure (0: what a
    search finds is neither shrunk nor diagnosed). large: largest Sk.

    enough: failures with a look known from elsewhere after which a question is not asked further (0: always asked).
    shared: the time is that of all built-in targets together, so that interpreted ones, whose calls take a hundred
    times as long, try less of it.
    """

    name: str
    examples: int
    shrink_seconds: float
    large: int
    enough: int = 0
    shared: bool = False


PROFILES = {
    "quick": Profile("quick", 15, 4.0, 1024, enough=1),
    "default": Profile("default", 32, 15.0, 4096),
    "deep": Profile("deep", 500, 60.0, 16384),
}


@dataclass(frozen=True, slots=True, repr=False)
class Input:
    """A case and small JSON facts about how it was made, by which reports group and plot."""

    case: Case
    features: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Input({self.case.describe()})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis writes down what it drew; the arrays would take longer than the search.
        printer.text(repr(self))


@dataclass(frozen=True, slots=True)
class Subject:
    """What properties are given. Calls are counted through `call`; nothing else runs the target."""

    target: Target
    dtype: str
    device: str = "cpu"
    conventions: Mapping[str, str] = field(default_factory=dict)
    forms: tuple[Contract, ...] = ()
    profile: Profile = PROFILES["default"]
    seconds: float = 60.0

    @property
    def fmt(self) -> Format:
        return FORMATS[self.dtype]

    @property
    def wide(self) -> Format:
        """The format of additive masks, slopes and sinks."""
        return beside(self.dtype)

    @property
    def output(self) -> Format:
        """The format that the contract gives outputs."""
        return resolved(self.forms[0].output.stored_as if self.forms else None, self.fmt)

    @property
    def op(self) -> str:
        return self.target.op

    def nat(self, output: str = "lse") -> float:
        """What an output has in the place of a nat: log2(e) in an LSE in base 2, else 1."""
        return LOG2_E if output == "lse" and self.conventions.get("lse_base") == "2" else 1.0

    def has(self, option: str) -> bool:
        """Whether the target takes this option."""
        return option in self.target.parameters and option in self.target.row.parameters

    def call(self, case: Case) -> Observed:
        """One call. ValueError, before the target is called, for a case that does not fit its op."""
        op_named(case.op).blocks(case)
        return run(self.target, case, device=self.device, seconds=self.seconds)

    def lower_presets(self) -> tuple[str, ...]:
        """Presets of the ladder below the one held to, strictest first."""
        steps = ladder(self.op, self.dtype)
        held = self.forms[0].preset
        return steps[steps.index(held) + 1 :] if held in steps else ()


def subject_for(
    target: Target,
    dtype: str,
    *,
    device: str = "cpu",
    contract: str | Mapping[str, object] | None = None,
    conventions: Mapping[str, str] | None = None,
    profile: Profile = PROFILES["default"],
) -> Subject:
    """A subject with the forms of ``contract`` (default: what the target declares, else the preset of its dtype).

    A preset named for a wider input (a ``flash`` kernel run on fp32) is held to the default of the dtype instead.
    """
    declared = contract if contract is not None else target.contract
    if isinstance(declared, Mapping):
        declared = dict(declared)
    elif declared is not None and contract is None and declared not in ladder(target.op, dtype):
        declared = None
    forms = declared_forms(target.op, declared, dtype)
    merged = {**target.conventions, **(conventions or {})}
    # Probed conventions count as the target's own: a case that follows them sets no option that it lacks.
    return Subject(replace(target, conventions=merged), dtype, device, merged, forms, profile)


# Where implementations break: first and last rows, and both sides of every usual tile border.
_BORDERS = np.array([0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])


def sampled_rows(count: int, keys: int, heads: int, *, budget: int = 2**21) -> Rows | None:
    """Which rows to certify: all (None) where that is cheap, else tile borders, the last rows and an even spread."""
    if count * keys * heads <= budget:
        return None
    wanted = max(8, min(64, budget // max(1, keys * heads)))
    spread = np.linspace(0, count - 1, wanted).astype(np.int64)
    chosen = np.concatenate([_BORDERS[count > _BORDERS][: wanted // 2], [max(0, count - 2), count - 1], spread])
    return np.unique(chosen)[: wanted + 8].astype(np.int64)
