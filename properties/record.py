"""Records: one JSON line per examined case and property, journaled before the target is called.

Each worker writes its own file ``records-<worker>.jsonl``. A line of kind ``begin`` is written and flushed before a target is
called and one of kind ``record`` after; a ``begin`` without its record is a crash or a hang, and `load` turns it into an ERROR.
Floats that must be exact are hex strings. Schema changes raise `SCHEMA`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One row of evidence.

    target, origin, op, dtype, device, property, title: what was examined. case: digest; description: shapes and options; features:
    small JSON facts about the input that reports group by (recipe, lengths, logit size, position, sink mass). verdict, basis,
    ratio, forms, detail, metrics, worst: as in `Judgement`. contract: preset name held to. datasheet: conventions. stem: path of the
    saved case, for failures. rerun: the command that repeats it. examples: how many cases the search tried. seconds: of target time.
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
    metrics: Mapping[str, Any] = field(default_factory=dict)
    worst: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    datasheet: Mapping[str, Any] = field(default_factory=dict)
    stem: str | None = None
    rerun: str = ""
    examples: int = 1
    seconds: float = 0.0
    waiver: str | None = None
    schema: int = SCHEMA


class DamagedRecords(ValueError):
    """A record file that cannot be read at all; one line that names it."""


def _plain(value: Any) -> Any:
    # JSON has no inf or nan: they travel as strings and come back through float().
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value


class Journal:
    """The record file of one worker. `begin` before the target runs, `complete` after."""

    def __init__(self, folder: Path, worker: str = "main") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"records-{worker}.jsonl"
        self._file = self.path.open("a", encoding="utf-8")
        self._serial = 0

    def begin(self, row: Mapping[str, Any]) -> int:
        self._serial += 1
        self._write({"kind": "begin", "serial": self._serial, "pid": os.getpid(), **row})
        return self._serial

    def complete(self, serial: int, record: Record | None) -> None:
        """End what `begin` announced; with None nothing is recorded (an example of a search, not its result)."""
        row = {} if record is None else asdict(record)
        self._write({"kind": "end" if record is None else "record", "serial": serial, "pid": os.getpid(), **row})

    def note(self, kind: str, row: Mapping[str, Any]) -> None:
        """A line of another kind: ``environment``, ``untested``."""
        self._write({"kind": kind, **row})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_plain(row), sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def lines(folder: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """All lines of all record files of a folder; None for a line that is damaged (a torn last line, say)."""
    for path in sorted(folder.glob("records-*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(text)
            except json.JSONDecodeError:
                row = None
            yield path, row if isinstance(row, dict) else None
