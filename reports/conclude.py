"""The end of a run: what its record files add up to, and its exit code.

Adds what no single check can know: a target that crashed or hung (a journaled call without its record), a contract of which no single form
is kept by all cases, and waivers that explained nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from properties.record import Journal, Record, lines
from properties.verdict import Verdict, exit_code
from properties.waivers import stale, waive

_FIELDS = {f.name for f in fields(Record)}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """records: all of the run, waived ones marked, with the run-level ones added. faults: oracle or suite faults. code: exit code."""

    records: tuple[Record, ...]
    faults: tuple[str, ...]
    damaged: int
    code: int


def record_from(row: dict[str, Any]) -> Record:
    """A record from its JSON line; TypeError or KeyError if it is none."""
    known = {k: v for k, v in row.items() if k in _FIELDS}
    ratio = known.get("ratio")
    known["ratio"] = None if ratio is None else float(ratio)
    known["forms"] = {k: float(v) for k, v in known.get("forms", {}).items()}
    return Record(**known)


def conclude(folder: Path, *, complete: bool) -> Conclusion:
    """Read a run's record files and write its run-level lines. ``complete``: every property of its targets was asked."""
    records: list[Record] = []
    begun: dict[tuple[str, int, int], dict[str, Any]] = {}
    faults: list[str] = []
    damaged = 0
    for path, row in lines(folder):
        if row is None:
            damaged += 1
            continue
        kind = row.get("kind")
        key = (path.name, row.get("pid", 0), row.get("serial", 0))
        if kind == "begin":
            begun[key] = row
        elif kind in ("end", "record"):
            begun.pop(key, None)
            if kind == "record":
                records.append(record_from(row))
        elif kind == "fault":
            faults.append(f"{row.get('test')}: {row.get('detail')}")
    added = [_crashed(row) for row in begun.values()] + contract_lines(records)
    records = [_waived(r) for r in (*records, *added)]
    added = [_waived(r) for r in added]
    for waiver in stale(records, complete=complete):
        detail = f"waiver {waiver.key} explained nothing in this run: delete it ({waiver.reason})"
        added.append(_line(waiver.target, "", waiver.dtypes[0], waiver.properties[0], Verdict.STALE_WAIVER, detail))
        records.append(added[-1])
    journal = Journal(folder, "verdicts")
    for record in added:
        journal.complete(journal.begin({"target": record.target, "property": record.property}), record)
    for record in records:
        if record.waiver is not None:
            journal.note(
                "waiver",
                {"target": record.target, "case": record.case, "property": record.property, "key": record.waiver},
            )
    journal.close()
    code = 3 if faults else exit_code(r.verdict for r in records)
    return Conclusion(tuple(records), tuple(faults), damaged, code)


def _waived(record: Record) -> Record:
    if record.verdict != Verdict.FAIL.value and record.verdict != Verdict.ERROR.value:
        return record
    waiver = waive(record)
    return record if waiver is None else replace(record, verdict=Verdict.WAIVED.value, waiver=waiver.key)


def _line(target: str, op: str, dtype: str, property_id: str, verdict: Verdict, detail: str, **more: Any) -> Record:
    return Record(
        target,
        more.pop("origin", "own"),
        op,
        dtype,
        more.pop("device", "cpu"),
        property_id,
        more.pop("title", ""),
        "",
        "",
        verdict.value,
        "exact",
        detail=detail,
        **more,
    )


def _crashed(row: dict[str, Any]) -> Record:
    detail = "the process died or hung during this call"
    return replace(
        _line(
            row.get("target", "?"),
            row.get("op", ""),
            row.get("dtype", ""),
            row.get("property", ""),
            Verdict.ERROR,
            detail,
        ),
        description=row.get("description", ""),
        features=row.get("features", {}),
        origin="user",
    )


def contract_lines(records: Iterable[Record]) -> list[Record]:
    """One record per target and dtype: the form of its contract that all its cases keep, or FAIL if each form breaks somewhere."""
    groups: dict[tuple[str, str, str, str, str], list[Record]] = defaultdict(list)
    for r in records:
        if r.forms and r.basis == "derived" and r.verdict == Verdict.PASS.value:
            groups[r.target, r.origin, r.op, r.dtype, r.device].append(r)
    result = []
    for (target, origin, op, dtype, device), rows in sorted(groups.items()):
        worst: dict[str, float] = {}
        for r in rows:
            for form, ratio in r.forms.items():
                worst[form] = max(worst.get(form, 0.0), ratio)
        form, ratio = min(worst.items(), key=lambda item: item[1])
        first = next(iter(rows[0].forms))
        if worst.get(first, float("inf")) <= 1:
            form, ratio = first, worst[first]
        preset = rows[0].contract
        if ratio <= 1:
            verdict, detail = Verdict.PASS, f"contract {preset} kept in its {form} form by all {len(rows)} cases"
        else:
            verdict, detail = Verdict.FAIL, f"no single form of contract {preset} is kept by all {len(rows)} cases"
        result.append(
            Record(
                target,
                origin,
                op,
                dtype,
                device,
                "contract",
                "one form of the contract for all cases",
                "",
                "",
                verdict.value,
                "derived",
                ratio=ratio,
                detail=detail,
                contract=preset,
                forms=worst,
            )
        )
    return result
