"""Records: one JSON line per examined case and property, journaled before the target is called.

Each worker writes its own file ``records-<worker>.jsonl``. A line of kind ``begin`` is written and flushed before a
target is called and one of kind ``record`` (or ``end``: nothing to keep) after. A ``begin`` without either is a call
that took its process with it: `unfinished` finds them, `finish` writes what became of them. Floats that must be exact
are hex strings. Schema changes raise `SCHEMA`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from properties.judge.verdict import Basis, Verdict

SCHEMA = 1
DIED = "the process died or hung during this call"
_LOST = (DIED, "timeout: ")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of evidence.

    target, origin, op, dtype, device, property, title: what was examined. case: digest; description: shapes and
    options; features: small JSON facts about the input that reports group by (recipe, lengths, logit size, position,
    sink mass). verdict, basis, ratio, forms, detail, metrics, worst: as in `Judgement`. contract: preset name held to.
    datasheet: conventions. stem: path of the saved case, for failures. rerun: the command that repeats it. examples:
    how many cases the search tried. seconds: of target time. waiver: key of what explains it. schema: of this row.
    diagnosis: what a failing case looks like ("as if ...", or where it is wrong); empty where nothing is known.
    """

    target: str
    origin: str
    op: str
    dtype: str
    device: str
    property: str
    title: str
    case: str
    description: str
    verdict: str
    basis: str
    ratio: float | None = None
    detail: str = ""
    contract: str = ""
    forms: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)
    worst: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, object] = field(default_factory=dict)
    datasheet: Mapping[str, object] = field(default_factory=dict)
    stem: str | None = None
    rerun: str = ""
    examples: int = 1
    seconds: float = 0.0
    waiver: str | None = None
    schema: int = SCHEMA
    diagnosis: str = ""


class DamagedRecords(ValueError):
    """A record file that cannot be read or written at all; one line that names it."""


def plain(value: object) -> object:
    """What JSON can hold of a value: lists, dicts with text keys, numbers; inf and nan as text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        # A numpy scalar or array.
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no inf or nan: they travel as strings and come back through float().
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def held(of: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are (`asdict` copies all that is in them)."""
    return {f.name: getattr(of, f.name) for f in fields(of)}


def _line(row: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(row, sort_keys=True, allow_nan=False, default=plain)
    except (ValueError, TypeError):
        # An inf or nan somewhere, or keys that are no texts.
        text = json.dumps(plain(row), sort_keys=True, allow_nan=False)
    return text + "\n"


class Journal:
    """The record file of one worker: `begin` before the target runs, `complete` after.

    context: facts about what is being examined that every ``begin`` line carries, for the case that nothing follows it.
    """

    def __init__(self, folder: Path, worker: str = "main") -> None:
        self.path = folder / f"records-{worker}.jsonl"
        self.context: Mapping[str, object] = {}
        self._serial = 0
        self._open: set[int] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise DamagedRecords(f"cannot write records to {folder}: {error.strerror or error}") from error

    def begin(self, row: Mapping[str, object]) -> int:
        """Announce a call; the number under which it ends."""
        self._serial += 1
        self._open.add(self._serial)
        self._write({"kind": "begin", "serial": self._serial, "pid": os.getpid(), **self.context, **row})
        return self._serial

    def complete(self, serial: int, record: Record | None) -> None:
        """End what `begin` announced; with None nothing is recorded (an example of a search, not its result)."""
        row = {} if record is None else held(record)
        self._open.discard(serial)
        self._write({"kind": "end" if record is None else "record", "serial": serial, "pid": os.getpid(), **row})

    def abandon(self) -> None:
        """End all that is still open without a record: the suite failed, not the target."""
        for serial in sorted(self._open):
            self.complete(serial, None)

    def note(self, kind: str, row: Mapping[str, object]) -> None:
        """A line of another kind: ``environment``, ``untested``, ``fault``, ``waiver``."""
        self._write({"kind": kind, **row})

    def _write(self, row: Mapping[str, object]) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def lines(folder: Path, *, words: tuple[str, ...] = ("",)) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """All lines of all record files of a folder; None for a line that is damaged (a torn last line, say).

    words: only lines with one of these in them.
    """
    for path in sorted(folder.glob("records-*.jsonl")):
        try:
            texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise DamagedRecords(f"cannot read {path}: {error.strerror or error}") from error
        for text in texts:
            if not text.strip() or not any(word in text for word in words):
                continue
            try:
                row = json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                row = None
            yield path, row if isinstance(row, dict) else None


def unfinished(folder: Path, *, file: str | None = None) -> list[tuple[Path, dict[str, object]]]:
    """``begin`` lines whose call never ended, with their files; only those of one ``file`` (name) if that is given."""
    begun: dict[tuple[object, ...], tuple[Path, dict[str, object]]] = {}
    for path, row in lines(folder):
        if row is None or (file is not None and path.name != file):
            continue
        key = (path.name, str(row.get("pid")), str(row.get("serial")))
        if row.get("kind") == "begin":
            begun[key] = (path, row)
        elif row.get("kind") in ("end", "record"):
            begun.pop(key, None)
    return list(begun.values())


def finish(path: Path, row: Mapping[str, object], record: Record | None) -> None:
    """End a ``begin`` line on behalf of the process that wrote it and died: with a record, or without one."""
    kind = "end" if record is None else "record"
    row_of_it = {} if record is None else held(record)
    with path.open("r+b") as file:
        # The dead process may have left half a line.
        torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        end = {"kind": kind, "serial": row.get("serial"), "pid": row.get("pid"), **row_of_it}
        file.write((b"\n" if torn else b"") + _line(end).encode())


def lost(row: Mapping[str, object]) -> Record:
    """The record of a call that took its process with it, from its ``begin`` line."""

    def text(name: str) -> str:
        return str(row.get(name) or "")

    features = row.get("features")
    return Record(
        target=text("target"),
        origin=text("origin") or "user",
        op=text("op"),
        dtype=text("dtype"),
        device=text("device") or "cpu",
        property=text("property"),
        title=text("title"),
        case="",
        description=text("description"),
        verdict=Verdict.ERROR.value,
        basis=Basis.EXACT.value,
        detail=DIED,
        contract=text("contract"),
        features=features if isinstance(features, Mapping) else {},
        rerun=text("rerun"),
    )


def bury(folder: Path, worker: str, test: str) -> list[Record]:
    """End on behalf of a worker that died what it had begun: ERRORs, or a fault if it was in no call of a target."""
    died = unfinished(folder, file=f"records-{worker}.jsonl")
    found = [lost(row) for _, row in died]
    for (path, row), record in zip(died, found, strict=True):
        finish(path, row, record)
    if not died:
        journal = Journal(folder, "run")
        journal.note("fault", {"test": test, "detail": f"worker {worker} died outside of any call of a target"})
        journal.close()
    return found


def died(record: Record) -> bool:
    """Whether the call of a record ended its process or did not end in time."""
    return record.detail.startswith(_LOST)


def lost_calls(folder: Path, target: str, dtype: str) -> list[str]:
    """How the calls of a target at a dtype ended that died or did not return, in every worker so far."""
    return [
        str(row["detail"])
        for _, row in lines(folder, words=_LOST)
        if row is not None
        and (row.get("kind"), row.get("target"), row.get("dtype")) == ("record", target, dtype)
        and str(row.get("detail")).startswith(_LOST)
    ]
