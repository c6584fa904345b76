"""Record files to one `Run`: damaged lines are counted, calls that never ended are ERRORs, unlike runs are refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from properties.judge.verdict import Verdict
from properties.record import SCHEMA, Record, lines, lost

# What two record files must agree on to be one run: the code under test and all that computes with it.
_ALIKE = ("commit", "dirty", "versions")
_NOTES = ("environment", "untested", "waiver", "fault", "interrupted")
_FIELDS = {f.name: f for f in fields(Record)}
_REQUIRED = tuple(n for n, f in _FIELDS.items() if f.default is MISSING and f.default_factory is MISSING)
_MAPPINGS = ("forms", "metrics", "worst", "features", "datasheet")


class UnlikeRuns(ValueError):
    """Record files that are not of one run; one line that names what differs and where."""


@dataclass(frozen=True, slots=True)
class Untested:
    """Something that was not asked, and why: an option that the target lacks, a target that cannot run here."""

    target: str
    op: str
    dtype: str
    property: str
    reason: str


@dataclass(frozen=True, slots=True)
class Waiver:
    """Why a finding does not count: the waiver's key, and its reason and link where the run recorded them."""

    target: str
    key: str
    reason: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """All that a folder's record files hold.

    records: waived ones marked, crashed calls added. environments: one a start of the suite. waivers: those applied.
    faults: what broke in the suite itself. damaged: unreadable lines by file. unknown: lines of unknown kinds.
    interrupted: somebody stopped the run.
    """

    folder: Path
    records: tuple[Record, ...] = ()
    untested: tuple[Untested, ...] = ()
    environments: tuple[Mapping[str, Any], ...] = ()
    waivers: tuple[Waiver, ...] = ()
    faults: tuple[str, ...] = ()
    damaged: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False


def load(folder: Path) -> Run:
    """The run in ``folder``/records-*.jsonl. UnlikeRuns, in one line, if its files belong to different runs."""
    records: list[Record] = []
    begun: dict[tuple[str, object, object], dict[str, object]] = {}
    crashed: list[dict[str, object]] = []
    notes: dict[str, list[dict[str, object]]] = {kind: [] for kind in _NOTES}
    places: list[tuple[str, Mapping[str, object]]] = []
    damaged: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for path, row in lines(folder):
        if row is None:
            damaged[path.name] += 1
            continue
        kind, key = str(row.get("kind")), (path.name, _hashable(row.get("pid")), _hashable(row.get("serial")))
        match kind:
            case "begin":
                # A serial number that begins again before it ended was cut off too.
                if key in begun:
                    crashed.append(begun[key])
                begun[key] = row
            case "end":
                begun.pop(key, None)
            case "record":
                begun.pop(key, None)
                _refuse_schema(path, row)
                record = record_from(row)
                if record is None:
                    damaged[path.name] += 1
                else:
                    records.append(record)
            case _ if kind in notes:
                notes[kind].append(row)
                if kind == "environment":
                    places.append((path.name, row))
            case _:
                unknown[kind] += 1
    _refuse_unlike(places)
    records += [lost(row) for row in (*crashed, *begun.values())]
    waivers = [_waiver(row) for row in notes["waiver"]]
    return Run(
        folder,
        tuple(_waived(records, notes["waiver"])),
        tuple(dict.fromkeys(Untested(*(_text(row, f.name) for f in fields(Untested))) for row in notes["untested"])),
        tuple(notes["environment"]),
        tuple(dict.fromkeys(waivers)),
        tuple(f"{_text(row, 'test')}: {_text(row, 'detail')}" for row in notes["fault"]),
        dict(damaged),
        dict(unknown),
        bool(notes["interrupted"]),
    )


def record_from(row: Mapping[str, Any]) -> Record | None:
    """The record of one line, or None if it does not hold one. Fields that this version does not know are ignored."""
    if any(not isinstance(row.get(name), str) for name in _REQUIRED):
        return None
    held = {name: value for name, value in row.items() if name in _FIELDS}
    try:
        Verdict(held["verdict"])
        held["ratio"] = number(held.get("ratio"))
        for name in _MAPPINGS:
            if not isinstance(held.get(name, {}), Mapping):
                return None
        held["forms"] = {str(k): float(v) for k, v in held.get("forms", {}).items()}
        held["examples"], held["seconds"] = int(held.get("examples", 1)), float(held.get("seconds", 0.0))
    except (TypeError, ValueError):
        return None
    for name in ("detail", "contract", "rerun"):
        held[name] = str(held.get(name) or "")
    return Record(**held)


def number(value: Any) -> float | None:
    """A figure from its JSON form ("inf" and "nan" travel as strings); None for anything else."""
    if value is None or isinstance(value, bool | list | dict):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _hashable(value: object) -> object:
    return value if isinstance(value, int | str | None) else str(value)


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _refuse_schema(path: Path, row: Mapping[str, object]) -> None:
    found = row.get("schema")
    if found != SCHEMA:
        raise UnlikeRuns(f"{path}: records have schema {found!r}, this version reads {SCHEMA}")


def _refuse_unlike(places: list[tuple[str, Mapping[str, object]]]) -> None:
    for (first_name, first), (name, other) in pairwise(places):
        for key in _ALIKE:
            if first.get(key) != other.get(key):
                difference = _difference(first.get(key), other.get(key))
                raise UnlikeRuns(f"{first_name} and {name} are of unlike runs: {key} {difference}".replace("\n", " "))


def _difference(one: object, other: object) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        differing = sorted(k for k in {*one, *other} if one.get(k) != other.get(k))
        return f"of {differing[0]} is {one.get(differing[0])} and {other.get(differing[0])}"
    return f"is {one!r} and {other!r}"


def _waiver(row: Mapping[str, object]) -> Waiver:
    return Waiver(_text(row, "target"), _text(row, "key"), _text(row, "reason"), _text(row, "link"))


def _waived(records: list[Record], rows: list[dict[str, object]]) -> list[Record]:
    """Records with their waivers: the end of a run notes them, the workers' lines stay as they were written."""
    keys = {(_text(r, "target"), _text(r, "case"), _text(r, "property")): _text(r, "key") for r in rows}
    marked = []
    for record in records:
        key = keys.get((record.target, record.case, record.property))
        if key is not None and record.verdict in (Verdict.FAIL.value, Verdict.ERROR.value):
            record = replace(record, verdict=Verdict.WAIVED.value, waiver=key)
        marked.append(record)
    return marked


def finite(value: object) -> float | None:
    """`number`, but None where it is not finite."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None
