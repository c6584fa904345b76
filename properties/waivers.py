"""Waivers: explained findings in code that is not ours, kept beside the targets in ``targets/waivers/<target>.toml``.

Each entry has properties, dtypes, texts of which the record's detail must contain one, reason, link and reproducer.
A waived record does not fail a run; a waiver that matched nothing in a run that covered it is itself an error
(STALE_WAIVER).
Only built-in third-party targets have waivers: not the project's own, and not a user's function of the same name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import targets
from oracle.formats import INPUTS
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
    contains: tuple[str, ...]
    reason: str
    link: str
    reproducer: str

    def explains(self, record: Record) -> bool:
        """Whether the record is about this finding: one of the texts stands in its detail."""
        return self.covers(record) and any(text in record.detail for text in self.contains)

    def covers(self, record: Record) -> bool:
        """Whether the record is about what this waiver is about, whatever its verdict."""
        return record.target == self.target and record.property in self.properties and record.dtype in self.dtypes


FOLDER = Path(targets.__file__).parent / "waivers"
_NAMES, _TEXTS = ("properties", "dtypes", "contains"), ("reason", "link", "reproducer")


@cache
def waivers_of(target: str, folder: Path = FOLDER) -> tuple[Waiver, ...]:
    """The waivers of one target, none if it has no file. BadWaiver if the file is damaged."""
    path = folder / f"{target}.toml"
    if not path.is_file():
        return ()
    try:
        entries: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as fault:
        raise BadWaiver(f"{path}: {type(fault).__name__}: {fault}") from fault
    return tuple(_waiver(path, target, key, entry) for key, entry in entries.items())


def _waiver(path: Path, target: str, key: str, entry: object) -> Waiver:
    if not isinstance(entry, Mapping):
        raise BadWaiver(f"{path}: {key} is no table of its own: write [{key}]")
    strange = [name for name in entry if name not in (*_NAMES, *_TEXTS)]
    if strange:
        raise BadWaiver(f"{path}: {key} has an unknown field {strange[0]!r}; known: {', '.join((*_NAMES, *_TEXTS))}")
    for name in (*_NAMES, *_TEXTS):
        value = entry.get(name)
        fits = isinstance(value, list) and all(isinstance(v, str) for v in value) if name in _NAMES else None
        if not value or fits is False or (fits is None and not isinstance(value, str)):
            kind = "a list of names" if name in _NAMES else "a text"
            raise BadWaiver(f"{path}: {key} needs {name}, {kind}")
    unknown = [d for d in entry["dtypes"] if d not in INPUTS]
    if unknown:
        raise BadWaiver(f"{path}: {key} names an unknown dtype {unknown[0]!r}; known: {', '.join(INPUTS)}")
    return Waiver(
        target=target,
        key=key,
        properties=tuple(entry["properties"]),
        dtypes=tuple(entry["dtypes"]),
        contains=tuple(entry["contains"]),
        reason=entry["reason"],
        link=entry["link"],
        reproducer=entry["reproducer"],
    )


def waive(record: Record) -> Waiver | None:
    """The waiver that explains this bad record, if there is one."""
    if record.origin != "third_party":
        return None
    for waiver in waivers_of(record.target):
        if waiver.explains(record):
            return waiver
    return None


def stale(records: Iterable[Record], *, complete: bool) -> list[Waiver]:
    """Waivers whose subject was examined in full (``complete``) and that explained nothing."""
    rows = [r for r in records if r.origin == "third_party"]
    unused: list[Waiver] = []
    if not complete:
        return unused
    for target in sorted({r.target for r in rows}):
        for waiver in waivers_of(target):
            covered = [r for r in rows if waiver.covers(r)]
            asked = {r.dtype for r in covered} >= set(waiver.dtypes)
            if asked and not any(r.waiver is not None and waiver.explains(r) for r in covered):
                unused.append(waiver)
    return unused
