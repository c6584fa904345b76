"""What two runs were asked, and whether their answers can be held against each other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from properties.options import OPTIONS, add_to
from properties.record import DamagedRecords
from reports.run.load import Run, UnlikeRuns, load

# Options that say where and how fast; a new option decides what is examined unless it is named here.
_OPEN = ("--out", "--store", "--no-store", "--json", "--workers")
# What a run notes as it was understood, beside the words of its command.
_NOTED = ("seed", "profile", "device")
# Options that choose among questions; the others change the questions.
CHOICES = ("target", "op", "dtype", "property")
# Versions that are compared, not held fixed.
_OURS = "attn-oracle"


def whole_run(folder: Path) -> Run:
    """The run in ``folder``, all of it. DamagedRecords, in one line, if it is not there, damaged or cut short."""
    if not folder.is_dir():
        raise DamagedRecords(f"no folder {str(folder)!r}")
    if not list(folder.glob("records-*.jsonl")):
        raise DamagedRecords(f"{folder} has no record files (records-*.jsonl)")
    run = load(folder)
    if run.damaged:
        name, count = next(iter(run.damaged.items()))
        raise DamagedRecords(f"{folder / name} has {count} damaged lines: what they held cannot be compared")
    if run.interrupted:
        raise DamagedRecords(f"{folder}: the run was interrupted, only a part was examined")
    if run.faults:
        raise DamagedRecords(f"{folder}: the run met a fault of the suite: {run.faults[0]}")
    # The last file that a run writes.
    if not (folder / "records-verdicts.jsonl").is_file():
        raise DamagedRecords(f"{folder} has no records-verdicts.jsonl: its run has not ended, or the file is lost")
    if not run.records:
        raise DamagedRecords(f"{folder} holds no record")
    if not run.environments:
        raise DamagedRecords(f"{folder} does not note its environment")
    return run


class _Words(argparse.ArgumentParser):
    """Reads the words of a command that was run; raises DamagedRecords where it cannot be one."""

    def error(self, message: str) -> NoReturn:
        raise DamagedRecords(f"{self.prog} notes a command that this version cannot read: {message}")


def asked(environment: Mapping[str, object], *, where: str = "a run") -> Mapping[str, object]:
    """What the run ``where`` was asked: the options that decide what is examined and how, lists of them sorted.

    Files are named without their folders: two versions of a kernel lie in two places. DamagedRecords if the words of
    the command were not noted or are not those of a command.
    """
    words = environment.get("argv")
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise DamagedRecords(f"{where} does not note the words of its command")
    reader = _Words(where, add_help=False)
    reader.add_argument("targets", nargs="*")
    add_to(reader.add_argument)
    options = reader.parse_args(words[1:])
    options.target = [*options.targets, *options.target]
    said = {row.flag.lstrip("-"): getattr(options, row.dest) for row in OPTIONS if row.flag not in _OPEN}
    return {n: environment.get(n) if n in _NOTED else _named(value) for n, value in said.items()}


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(_named, value))
    return str(value).rpartition("/")[2] if isinstance(value, str | Path) else value


def refuse_unlike(old: Run, new: Run, *, across_versions: bool = False, common: bool = False) -> tuple[str, ...]:
    """What differs between two runs and does not keep them from being compared, one line each.

    UnlikeRuns, in one line that names the input, if they were asked different things (``common``: the choice of
    targets, ops, dtypes and properties may differ), or by other libraries (``across_versions``: they may differ).
    """
    told = [(run.folder, asked(e, where=str(run.folder))) for run in (old, new) for e in run.environments]
    (place, expected), *others = told
    for folder, found in others:
        for name, value in found.items():
            if value != expected[name] and not (common and name in CHOICES):
                raise UnlikeRuns(
                    f"the runs are unlike in {name}: {_said(expected[name])} in {place}, {_said(value)} in {folder}"
                    + ("; --common compares what both asked" if name in CHOICES else "")
                )
    mine, theirs = old.environments[0], new.environments[0]
    versions = _versions(mine, theirs)
    if versions and not across_versions:
        raise UnlikeRuns(f"the runs are unlike in versions: {versions}; --across-versions compares them all the same")
    notes = [f"versions differ: {versions}"] if versions else []
    for name in ("processor", "system"):
        if mine.get(name) != theirs.get(name):
            notes.append(f"{name} differs: {mine.get(name)} and {theirs.get(name)}")
    return tuple(notes)


def _said(value: object) -> str:
    return (
        " ".join(value) or "none stated" if isinstance(value, list) else "none stated" if value is None else str(value)
    )


def _versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    mine, theirs = old.get("versions") or {}, new.get("versions") or {}
    names = sorted({*mine, *theirs} - {_OURS})
    return ", ".join(f"{n} {mine.get(n)} and {theirs.get(n)}" for n in names if mine.get(n) != theirs.get(n))
