"""What a run says at its end: one message per broken property of a target, the smallest case first, then the counts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from properties.judge.verdict import BAD, Verdict
from properties.message import failure_message
from properties.record import Record
from reports.command.conclude import Conclusion
from reports.run.load import Untested


def summary(concluded: Conclusion, pages: Iterable[Path], *, messages: int = 12) -> str:
    """The text that ends `attn-oracle verify`."""
    lines: list[str] = []
    groups = _findings(concluded.records)
    for number, rows in enumerate(groups):
        if number == messages:
            lines.append(f"... and {len(groups) - messages} more findings: see the report")
            break
        lines += [*_finding(rows), ""]
    for r in concluded.records:
        if r.property == "contract":
            lines.append(f"{r.verdict:<9} {r.target} {r.dtype}: {r.detail}")
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


def _findings(records: Iterable[Record]) -> list[list[Record]]:
    """Bad records by target and property; errors by target and what went wrong, which breaks many properties alike."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if Verdict(r.verdict) in BAD and r.property != "contract":
            what = r.detail if r.verdict == Verdict.ERROR.value else f"{r.property} {r.title}"
            groups[r.target, what].append(r)
    return list(groups.values())


def _finding(rows: list[Record]) -> list[str]:
    """The message of the smallest case, and where else the same was found."""
    first = min(rows, key=_size)
    dtypes = sorted({r.dtype for r in rows} - {first.dtype})
    properties = sorted({r.property for r in rows} - {first.property}, key=property_order)
    more = [f"{len(rows) - 1} more failing cases"] if len(rows) > 1 else []
    more += [f"also in {', '.join(dtypes)}"] if dtypes else []
    more += [f"in {', '.join(properties)} too"] if properties else []
    return [failure_message(first), *([f"  also     {'; '.join(more)}"] if more else [])]


def _size(record: Record) -> tuple[int, str]:
    def length(*names: str) -> int:
        found = next((record.features[n] for n in names if record.features.get(n)), 1)
        return int(found) if isinstance(found, int | float) else 1

    return length("sk", "n") * length("sq"), record.dtype


def property_order(property_id: str) -> tuple[str, int]:
    """Sorts P2 before P10; names without a number come after those of their letter."""
    found = re.fullmatch(r"([A-Za-z]+)(\d+)", property_id)
    return (found[1], int(found[2])) if found else (property_id, 0)


def _untested(rows: Iterable[Untested]) -> list[str]:
    reasons: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        reasons[row.target, row.reason].add(row.property)
    return [
        f"untested  {target}: " + (f"{', '.join(sorted(ids, key=property_order))}: " if any(ids) else "") + reason
        for (target, reason), ids in sorted(reasons.items())
    ]
