"""What a run says at its end: one message per broken property of a target, the smallest case first, then the counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from properties.message import failure_message
from properties.record import Record
from properties.verdict import BAD, Verdict
from reports.conclude import Conclusion


def summary(concluded: Conclusion, pages: Iterable[Path], *, messages: int = 12) -> str:
    """The text that ends `attn-oracle verify`."""
    lines: list[str] = []
    groups = _findings(concluded.records)
    for number, rows in enumerate(groups):
        if number == messages:
            lines.append(f"... and {len(groups) - messages} more broken properties: see the report")
            break
        first = min(rows, key=_size)
        others = sorted({r.dtype for r in rows if r.dtype != first.dtype})
        lines.append(failure_message(first))
        more = [f"{len(rows) - 1} more failing cases"] if len(rows) > 1 else []
        more += [f"also in {', '.join(others)}"] if others else []
        if more:
            lines.append(f"  also     {'; '.join(more)}")
        lines.append("")
    for r in concluded.records:
        if r.property == "contract":
            lines.append(f"{r.verdict:<9} {r.target} {r.dtype}: {r.detail}")
    waived = Counter((r.target, r.waiver) for r in concluded.records if r.waiver is not None)
    lines += [f"WAIVED    {target}: {key} ({count} records)" for (target, key), count in sorted(waived.items())]
    lines += [f"FAULT     {fault}" for fault in concluded.faults]
    if concluded.damaged:
        lines.append(f"{concluded.damaged} damaged record lines were left out")
    lines += _untested(concluded.records)
    counts = Counter(r.verdict for r in concluded.records)
    lines.append(", ".join(f"{counts[v.value]} {v.value}" for v in Verdict if counts[v.value]) or "nothing was checked")
    lines += [f"report: {page}" for page in pages]
    return "\n".join(lines)


def _findings(records: Iterable[Record]) -> list[list[Record]]:
    """Bad records by target and property, the run-level ones last."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if Verdict(r.verdict) in BAD and r.property != "contract":
            groups[r.target, r.property].append(r)
    return list(groups.values())


def _size(record: Record) -> tuple[int, str]:
    return int(record.features.get("sk", record.features.get("n", 0)) or 0) * int(
        record.features.get("sq", 1) or 1
    ), record.dtype


def _untested(records: Iterable[Record]) -> list[str]:
    reasons: dict[tuple[str, str], set[str]] = defaultdict(set)
    for r in records:
        if r.verdict == Verdict.UNSUPPORTED.value and not r.case:
            reasons[r.target, r.detail].add(r.property)
    return [
        f"untested  {target}: {', '.join(sorted(ids, key=lambda i: (i[0], int(i[1:]))))}: {reason}"
        for (target, reason), ids in sorted(reasons.items())
    ]
