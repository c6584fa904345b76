"""What a run says at its end: each defect with its smallest case, one line a target, then the counts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from oracle.formats import INPUTS
from properties.fit import PROPERTY, understood
from properties.judge.verdict import BAD, Verdict, exit_code
from properties.message import failure_message, filed_under, same_defect
from properties.record import Record, died
from reports.command.conclude import Conclusion
from reports.run.load import Untested
from targets.calling.target import Target

_OUTCOMES = {0: "PASS", 1: "FAIL", 3: "UNDECIDED"}


def summary(concluded: Conclusion, pages: Iterable[Path], *, messages: int = 12, told: bool = False) -> str:
    """The text that ends `attn-oracle verify`; ``told``: the first failure of each kind was shown when it happened."""
    lines: list[str] = []
    groups = _findings(concluded.records)
    for number, rows in enumerate(groups):
        if number == messages:
            lines.append(f"... and {len(groups) - messages} more findings: see the report")
            break
        lines += [*(_recalled(rows) if told else _finding(rows)), ""]
    lines += _targets(concluded.records)
    waived = Counter((r.target, r.waiver) for r in concluded.records if r.waiver is not None)
    lines += [f"WAIVED    {target}: {key} ({count} records)" for (target, key), count in sorted(waived.items())]
    lines += [f"FAULT     {fault}" for fault in dict.fromkeys(concluded.faults)]
    if concluded.damaged:
        lines.append(f"{concluded.damaged} damaged record lines were left out")
    lines += _untested(concluded.untested)
    if concluded.interrupted:
        lines.append("interrupted: only a part was examined")
    counts = Counter(r.verdict for r in concluded.records)
    lines.append(", ".join(f"{counts[v.value]} {v.value}" for v in Verdict if counts[v.value]) or "nothing was checked")
    lines += [f"report: {page}" for page in pages]
    return "\n".join(lines)


def as_understood(target: Target) -> str:
    """What a target's parameters were taken for, in a few lines."""
    if target.forward is not None:
        return f"{target.name}: {target.op}, the gradient of {target.forward.name} as torch differentiates it"
    read = understood(target)
    lines = [f"{target.name}: {target.op} in {', '.join(target.dtypes)}"]
    lines[0] += f"; takes {', '.join(read['options'])}" if read["options"] else ""
    lines += [f"  ignored: {', '.join(read['ignored'])} (left as they are)"] if read["ignored"] else []
    lines += [f"  cannot be tested: {', '.join(read['lacking'])} (no such parameter)"] if read["lacking"] else []
    return "\n".join(lines)


def nothing_fits(concluded: Conclusion) -> list[str]:
    """Where no target took even a tiny call in any dtype: one line for each way in which that failed; else nothing."""
    refused = [r for r in concluded.records if r.property == PROPERTY and not died(r)]
    if not refused or len(refused) < len(concluded.records) or concluded.faults or concluded.interrupted:
        return []
    alike: dict[str, list[Record]] = defaultdict(list)
    for r in refused:
        alike[r.detail].append(r)
    return [
        f"{', '.join(dict.fromkeys(r.target for r in rows))}: not even a tiny call succeeds "
        f"(in {', '.join(name for name in INPUTS if name in {r.dtype for r in rows})}): {detail}"
        for detail, rows in alike.items()
    ]


def _findings(records: Iterable[Record]) -> list[list[Record]]:
    """Bad records by target and what they are filed under."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if Verdict(r.verdict) in BAD and r.property != "contract":
            groups[same_defect(r)].append(r)
    return list(groups.values())


def _finding(rows: list[Record]) -> list[str]:
    """The message of the smallest case, and where else the same was found."""
    first = min(rows, key=size)
    dtypes = sorted({r.dtype for r in rows} - {first.dtype})
    properties = sorted({r.property for r in rows} - {first.property}, key=property_order)
    more = [f"{len(rows) - 1} more failing cases"] if len(rows) > 1 else []
    more += [f"also in {', '.join(dtypes)}"] if dtypes else []
    more += [f"in {', '.join(properties)} too"] if properties else []
    return [failure_message(first), *([f"  also     {'; '.join(more)}"] if more else [])]


def _recalled(rows: list[Record]) -> list[str]:
    """A defect that was told in full before: how often it was met, and where its smallest case is."""
    first = min(rows, key=size)
    properties = sorted({r.property for r in rows}, key=property_order)
    cases = f"{len(rows)} failing case{'s' if len(rows) > 1 else ''}"
    lines = [f"{first.target}: {filed_under(first)}"]
    lines.append(f"  {cases} of {', '.join(properties)} in {', '.join(sorted({r.dtype for r in rows}))}")
    lines += [f"  smallest {first.description}"] if first.description else []
    lines += [f"  rerun    {first.rerun}"] if first.rerun else []
    return lines


def _targets(records: Sequence[Record]) -> list[str]:
    """One line a target: its outcome, as in the exit code, what it breaks, and what became of its contract."""
    by_target: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        by_target[r.target].append(r)
    return [f"{_outcome(rows):<9} {target}: {'; '.join(_parts(rows))}" for target, rows in sorted(by_target.items())]


def _outcome(rows: Sequence[Record]) -> str:
    code = exit_code(r.verdict for r in rows)
    undecided = any(r.verdict == Verdict.UNDECIDED.value for r in rows)
    return _OUTCOMES[code] if code != 3 or undecided else "UNTESTED"


def _parts(rows: Sequence[Record]) -> list[str]:
    cases = [r for r in rows if r.property != "contract"]
    bad = [r for r in cases if Verdict(r.verdict) in BAD]
    parts = [f"{len(cases)} cases"]
    if bad:
        broken = ", ".join(sorted({r.property for r in bad}, key=property_order))
        parts = [f"{len(bad)} of {len(cases)} cases fail, in {broken}"]
    return parts + [f"{r.dtype}: {r.detail}" for r in rows if r.property == "contract"]


def size(record: Record) -> tuple[int, str]:
    """By which the smallest of several failing cases is chosen."""

    def length(*names: str) -> int:
        found = next((record.features[n] for n in names if record.features.get(n)), 1)
        return int(found) if isinstance(found, int | float) else 1

    return length("sk", "n") * length("sq"), record.dtype


def property_order(property_id: str) -> tuple[str, int]:
    """Sorts P2 before P10; names without a number come after those of their letter."""
    found = re.fullmatch(r"([A-Za-z]+)(\d+)", property_id)
    return (found[1], int(found[2])) if found else (property_id, 0)


def _listed(ids: set[str]) -> str:
    return f"{', '.join(sorted(ids, key=property_order))}: " if ids else ""


def _untested(rows: Iterable[Untested]) -> list[str]:
    reasons: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        reasons[row.target, row.reason].add(row.property)
    return [f"untested  {target}: {_listed(ids - {''})}{reason}" for (target, reason), ids in sorted(reasons.items())]
