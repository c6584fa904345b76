"""Waivers: explained findings in code that is not ours, kept beside the targets in ``targets/waivers/<target>.toml``.

Each entry has properties, dtypes, a text that the record's detail must contain, reason, link and reproducer. A waived record does not
fail a run; a waiver that matched nothing in a run that covered it is itself an error (STALE_WAIVER). The project's own targets have none.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import targets
from properties.record import Record


class BadWaiver(ValueError):
    """A waiver file that cannot be used; one line that names file and entry."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """One explained finding. key names it in reports."""

    target: str
    key: str
    properties: tuple[str, ...]
    dtypes: tuple[str, ...]
    contains: str
    reason: str
    link: str
    reproducer: str

    def covers(self, record: Record) -> bool:
        """Whether the record is about what this waiver is about, whatever its verdict."""
        return record.target == self.target and record.property in self.properties and record.dtype in self.dtypes


FOLDER = Path(targets.__file__).parent / "waivers"


@lru_cache(maxsize=None)
def waivers_of(target: str, folder: Path = FOLDER) -> tuple[Waiver, ...]:
    """The waivers of one target, none if it has no file. BadWaiver if the file is damaged."""
    path = folder / f"{target}.toml"
    if not path.is_file():
        return ()
    try:
        entries: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Waiver(
                target=target,
                key=key,
                properties=tuple(entry["properties"]),
                dtypes=tuple(entry["dtypes"]),
                contains=entry["contains"],
                reason=entry["reason"],
                link=entry["link"],
                reproducer=entry["reproducer"],
            )
            for key, entry in entries.items()
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as fault:
        raise BadWaiver(f"{path}: {type(fault).__name__}: {fault}") from fault


def waive(record: Record) -> Waiver | None:
    """The waiver that explains this bad record, if there is one; never for the project's own targets."""
    if record.origin == "own":
        return None
    for waiver in waivers_of(record.target):
        if waiver.covers(record) and waiver.contains in record.detail:
            return waiver
    return None


def stale(records: Iterable[Record], *, complete: bool) -> list[Waiver]:
    """Waivers whose subject was examined in full (``complete``) and that explained nothing."""
    rows = list(records)
    unused = []
    if not complete:
        return unused
    for target in sorted({r.target for r in rows}):
        for waiver in waivers_of(target):
            covered = [r for r in rows if waiver.covers(r)]
            asked = {r.dtype for r in covered} >= set(waiver.dtypes)
            if asked and not any(r.waiver == waiver.key or waive(r) == waiver for r in covered):
                unused.append(waiver)
    return unused
