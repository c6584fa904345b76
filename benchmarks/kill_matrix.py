"""Which edge input of which property kills which mutant, and at what cost: what the order of questions is made from.

    python benchmarks/kill_matrix.py [--op OP ...] [--again]

Measures what `benchmarks/kill_matrix.json` does not hold yet (``--again``: all), then writes it and the table that
follows from it, `properties/data/first_look.json`. For each op the honest kernel tells what every edge input costs;
each mutant is then asked all that cost at most `LIMIT` seconds, in one of its dtypes.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle.ops.table import op_named
from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.order import LIMIT, TABLE, cover, keyed, rank
from properties.search import judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.honest.table import HONEST
from targets.mutants.table import mutants
from targets.probing.probes import probe

MATRIX = Path(__file__).with_suffix(".json")
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(slots=True)
class Measured:
    """Of one op: processor seconds by key, and mutant -> the keys that kill it."""

    costs: dict[str, float] = field(default_factory=dict)
    kills: dict[str, list[str]] = field(default_factory=dict)


def load(path: Path = MATRIX) -> dict[str, Measured]:
    """The stored matrix by op; empty without one."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result = {}
    for op, entry in found.items():
        keys = list(entry["costs"])
        result[op] = Measured(entry["costs"], {m: [keys[i] for i in at] for m, at in entry["kills"].items()})
    return result


def save(found: dict[str, Measured], path: Path = MATRIX) -> None:
    lines = []
    for op, one in sorted(found.items()):
        keys = sorted(one.costs)
        costs = {key: round(one.costs[key], 4) for key in keys}
        place = {key: i for i, key in enumerate(keys)}
        kills = {m: sorted(place[key] for key in held) for m, held in sorted(one.kills.items())}
        lines.append(f"{json.dumps(op)}: " + json.dumps({"costs": costs, "kills": kills}, separators=(",", ":")))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table(found: dict[str, Measured]) -> str:
    """What `properties/data/first_look.json` holds."""
    first = {op: cover(one.costs, one.kills, limit=LIMIT) for op, one in sorted(found.items())}
    ranked = {op: rank(one.costs, one.kills) for op, one in sorted(found.items())}
    return json.dumps({"first": first, "rank": ranked}, indent=1) + "\n"


def subject_of(spec: str, op: str, dtype: str) -> Subject:
    target = resolve(spec, op=op)
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILES["quick"])


def asked(subject: Subject, costs: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Seconds by key of every edge input that is not known to cost more than `LIMIT`, and the keys that failed."""
    seconds: dict[str, float] = {}
    failed = []
    for prop in properties_for(subject.op):
        for key, edge in () if prop.missing(subject) else keyed(prop, list(prop.edges(subject))):
            if costs.get(key, 0.0) <= LIMIT:
                start = time.process_time()
                verdict = judge(subject, prop, edge).verdict
                seconds[key] = time.process_time() - start
                failed += [key] if verdict is Verdict.FAIL else []
    return seconds, failed


def measure(op: str, one: Measured) -> None:
    """Add what ``one`` lacks of ``op``."""
    if not one.costs:
        honest = next(h for h in HONEST if h.op == op)
        for dtype in [d for d in DTYPES if d in op_named(op).formats]:
            seconds, failed = asked(subject_of(honest.target, op, dtype), {})
            assert not failed, f"the honest kernel of {op} fails {failed}"
            for key, cost in seconds.items():
                one.costs[key] = max(cost, one.costs.get(key, 0.0))
    for row in [m for m in mutants() if m.op == op and m.name not in one.kills]:
        dtype = next((d for d in DTYPES if d in row.dtypes), row.dtypes[0])
        seconds, one.kills[row.name] = asked(subject_of(row.target, op, dtype), one.costs)
        # Edge inputs that the honest kernel has no option for, or other conventions.
        one.costs = seconds | one.costs
        print(f"{op} {row.name} {dtype}: {len(one.kills[row.name])} of {len(seconds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {} if options.again else load()
    for op in options.op or list(dict.fromkeys(m.op for m in mutants())):
        measure(op, found.setdefault(op, Measured()))
        save(found)
    TABLE.write_text(table(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
