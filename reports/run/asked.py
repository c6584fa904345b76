"""What two runs were asked, and whether their answers can be held against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from properties.record import DamagedRecords
from reports.run.load import Run, UnlikeRuns, load

# Options of `verify` that say where and how fast, or that a run notes in their parsed form.
_NOTED = ("seed", "profile", "device")
_OPEN = ("out", "workers", "json")
_OPTIONS = ("target", "op", "dtype", "contract", "convention", "property", "case", "timeout", *_NOTED, *_OPEN)
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


def asked(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run was asked: the options that decide what is examined and how, each with its sorted values.

    Files are named without their folders: two versions of a kernel lie in two places. DamagedRecords if the words of
    the command were not noted.
    """
    words = environment.get("argv")
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise DamagedRecords("a run does not note the words of its command")
    found: dict[str, list[str]] = defaultdict(list)
    rest = iter(words[1:])
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[_full(name)].append(value if equals else next(rest, ""))
        else:
            found["target"].append(word)
    values = {n: sorted(v.rpartition("/")[2] for v in found[n]) for n in _OPTIONS if n not in (*_NOTED, *_OPEN)}
    return {**{n: environment.get(n) for n in _NOTED}, **values}


def _full(name: str) -> str:
    """The option that an abbreviation stands for, as argparse reads it."""
    meant = [option for option in _OPTIONS if option.startswith(name)]
    return name if name in _OPTIONS or len(meant) != 1 else meant[0]


def refuse_unlike(old: Run, new: Run, *, across_versions: bool = False, common: bool = False) -> tuple[str, ...]:
    """What differs between two runs and does not keep them from being compared, one line each.

    UnlikeRuns, in one line that names the input, if they were asked different things (``common``: the choice of
    targets, ops, dtypes and properties may differ), or by other libraries (``across_versions``: they may differ).
    """
    first, *others = [*old.environments, *new.environments]
    expected = asked(first)
    for other in others:
        for name, value in asked(other).items():
            if value != expected[name] and not (common and name in CHOICES):
                raise UnlikeRuns(
                    f"the runs are unlike in {name}: {_said(expected[name])} in {old.folder}, {_said(value)} in "
                    f"{new.folder}" + ("; --common compares what both asked" if name in CHOICES else "")
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


def _said(value: Any) -> str:
    return (" ".join(value) or "none stated") if isinstance(value, list) else str(value)


def _versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    mine, theirs = old.get("versions") or {}, new.get("versions") or {}
    names = sorted({*mine, *theirs} - {_OURS})
    return ", ".join(f"{n} {mine.get(n)} and {theirs.get(n)}" for n in names if mine.get(n) != theirs.get(n))
