"""Who is probed: a target at a dtype on a device, called on tiny cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oracle.case import Case
from targets.calling.target import Observed, Target, run
from targets.probing.tiny import tiny_case

# A kernel that knows few head dimensions knows one of these.
WIDTHS = (16, 64, 128)


@dataclass(frozen=True, slots=True)
class Asked:
    """A target at a dtype on a device, and a width that it takes."""

    target: Target
    dtype: str
    device: str
    width: int = 16

    def has(self, option: str) -> bool:
        return option in self.target.parameters

    def call(self, **shape_and_options: Any) -> tuple[Case, Observed]:
        """One call on a tiny case."""
        case = tiny_case(self.target.op, self.dtype, width=self.width, **shape_and_options)
        return case, run(self.target, case, device=self.device)


def asked_of(target: Target, dtype: str, *, device: str = "cpu") -> tuple[Asked, Observed]:
    """The first width at which an ordinary call is not refused, and what came of that call."""
    for width in WIDTHS:
        asked = Asked(target, dtype, device, width)
        seen = asked.call()[1]
        if seen.fault is None or not seen.fault[1].startswith("NotImplementedError"):
            break
    return asked, seen
