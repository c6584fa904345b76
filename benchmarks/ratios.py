"""What the oracle may cost, as ratios of times measured in one run, with the goal of each.

Absolute times depend on the machine and on who else uses it; a ratio of two minima of the same run hardly does.
``python -m benchmarks.ratios out/benchmark-ratios.json`` prints the table of an earlier run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Goal:
    """cost / unit, both sums of measured times (names of benchmarks, with a factor each); ``at_least``: more is
    better."""

    name: str
    cost: tuple[tuple[str, float], ...]
    unit: tuple[tuple[str, float], ...]
    goal: float
    at_least: bool = False


GOALS = (
    Goal(
        "enclosure of a head of 1024 x 1024, d 64, to one plain float64 evaluation",
        (("square enclosure", 1.0),),
        (("square plain", 1.0),),
        4.0,
    ),
    Goal(
        "enclosure, bounds of all forms of flash and model kernel of that head, to one plain float64 evaluation",
        (("square enclosure", 1.0), ("square bounds, five forms", 1.0), ("square model", 1.0)),
        (("square plain", 1.0),),
        12.0,
    ),
    Goal(
        "the same of 64 rows against 65536 keys, d 128",
        (("long enclosure", 1.0), ("long bounds, five forms", 1.0), ("long model", 1.0)),
        (("long plain", 1.0),),
        15.0,
    ),
    Goal(
        "enclosure and bounds of all forms of flash, gradients of 256 x 256, d 64, to one plain float64 evaluation",
        (("gradients enclosure, bounds of seven forms", 1.0),),
        (("gradients plain", 1.0),),
        20.0,
    ),
    Goal(
        "mpmath on that head (64 times 16 rows), to its enclosure",
        (("square mpmath, 16 rows", 64.0),),
        (("square enclosure", 1.0),),
        1000.0,
        at_least=True,
    ),
    Goal(
        "enclosure of 64 rows against 65536 keys, d 128, to one plain float64 evaluation",
        (("long enclosure", 1.0),),
        (("long plain", 1.0),),
        4.0,
    ),
    Goal(
        "enclosure of dq, dk, dv of a head of 256 x 256, d 64, to one plain float64 evaluation",
        (("gradients enclosure", 1.0),),
        (("gradients plain", 1.0),),
        10.0,
    ),
)
"""Every name is one benchmark of `benchmarks/test_oracle_cost.py`."""


@dataclass(frozen=True, slots=True)
class Ratio:
    name: str
    value: float
    goal: float
    at_least: bool
    kept: bool


def ratios(times: Mapping[str, float]) -> list[Ratio]:
    """One row per goal whose times were all measured; ``times`` in seconds by name."""
    rows = []
    for goal in GOALS:
        if any(name not in times for name, _ in (*goal.cost, *goal.unit)):
            continue
        value = _total(goal.cost, times) / _total(goal.unit, times)
        kept = value >= goal.goal if goal.at_least else value <= goal.goal
        rows.append(Ratio(goal.name, value, goal.goal, goal.at_least, kept))
    return rows


def _total(parts: Sequence[tuple[str, float]], times: Mapping[str, float]) -> float:
    return sum(times[name] * factor for name, factor in parts)


def table(rows: Sequence[Ratio]) -> str:
    """The rows as lines of text."""
    lines = [f"{'ratio':>9}  {'goal':>8}  "]
    for row in rows:
        goal = f"{'>=' if row.at_least else '<='} {row.goal:g}"
        lines.append(f"{row.value:9.3g}  {goal:>8}  {'' if row.kept else 'MISSED: '}{row.name}")
    return "\n".join(lines)


def write(times: Mapping[str, float], path: Path) -> list[Ratio]:
    """Times and ratios as JSON in ``path``; returns the ratios."""
    rows = ratios(times)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"seconds": dict(times), "ratios": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return rows


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m benchmarks.ratios FILE.json")
        return 2
    rows = ratios(json.loads(Path(sys.argv[1]).read_text())["seconds"])
    print(table(rows))
    return 0 if rows and all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
