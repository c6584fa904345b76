"""The ``attn-oracle`` command: parse, check what was asked, start pytest, a report or a comparison.

Exit codes: 0 all well; 1 any FAIL, ERROR or STALE_WAIVER, or worse than the run before; 2 wrong use; 3 an oracle or
internal fault, UNDECIDED, nothing checked, or interrupted.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from oracle.case import DamagedCase
from oracle.contract.contract import UnknownContract
from oracle.store.kept import default_folder
from properties.record import DamagedRecords, Journal, lines
from properties.waivers import BadWaiver
from reports.command import suite
from reports.command.again import ask_again
from reports.command.changes import changes, document
from reports.command.conclude import conclude
from reports.command.environment import environment
from reports.command.listing import as_text, listing
from reports.command.options import PROGRAM, parsed
from reports.command.request import WrongUse, check, left_out
from reports.command.terminal import as_understood, nothing_fits, summary
from reports.page.build import build
from reports.run.compare import compare
from reports.run.load import UnlikeRuns
from targets.calling.registry import Unavailable, UnknownTarget
from targets.calling.target import BadTarget

BROKEN, WRONG_USE, FAULT = 1, 2, 3

_REFUSALS = (
    WrongUse,
    UnknownTarget,
    BadTarget,
    Unavailable,
    UnknownContract,
    DamagedCase,
    DamagedRecords,
    UnlikeRuns,
    BadWaiver,
)


def run() -> int:
    """The command as a process of its own, whose end need not search all of torch for garbage."""
    code = main()
    if "triton" not in sys.modules:
        # Its bindings tell of everything that is still there at the end, as of leaks.
        gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parsed(words)
    try:
        match options.command:
            case "verify":
                return _verify(options, words)
            case "targets":
                return _targets(options)
            case "report":
                return _report(options.folder)
            case "compare":
                return _compare(options)
            case other:
                raise WrongUse(f"unknown command {other!r}")
    except _REFUSALS as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return FAULT
    except Exception:
        # The interpreter's own exit code, 1, would read as a finding about a target.
        traceback.print_exc()
        print(f"{PROGRAM}: an internal fault: please report it with the lines above", file=sys.stderr)
        return FAULT


def _verify(options: argparse.Namespace, words: list[str]) -> int:
    out = options.records = _folder(options)
    if options.last_failed:
        ask_again(options, out)
    with _collector_at_rest():
        found = check(options)
    _clear(out, options.case)
    if options.json is not None:
        _try_to_write(options.json)
    run = Journal(out, "run")
    run.note("environment", environment(words, seed=options.seed, profile=options.profile, device=options.device))
    for name, reason in left_out(options, found):
        run.note("untested", {"target": name, "op": "", "dtype": "", "property": "", "reason": reason})
    run.close()
    options.store = options.store or default_folder()
    if options.case is None:
        for target in found:
            print(as_understood(target), flush=True)
    code = suite.run_suite(options, found, sys.stdout)
    if code == suite.USAGE:
        return WRONG_USE
    narrowed = options.property or options.only or options.exitfirst or options.case is not None
    whole = not narrowed and options.contract is None and not options.convention
    concluded = conclude(out, complete=whole and options.profile != "quick", interrupted=code == suite.INTERRUPTED)
    for line in _about_the_store(out):
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    if options.json is not None:
        records = [_finite(asdict(r)) for r in concluded.records]
        options.json.write_text(json.dumps(records, indent=1, default=str) + "\n", encoding="utf-8")
    misfits = nothing_fits(concluded)
    if misfits:
        for line in misfits:
            print(f"{PROGRAM}: {line}", file=sys.stderr)
        return WRONG_USE
    pages, fault = _pages(out)
    print("\n" + summary(concluded, pages, told=True))
    if code == BROKEN and concluded.code == 0:
        fault = "pytest reports a failure that no record explains"
    if code == suite.INTERNAL:
        fault = "pytest stopped with an internal error (above)"
    if fault:
        print(f"{PROGRAM}: {fault}", file=sys.stderr)
        return FAULT
    return concluded.code


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A framework that is imported makes a hundred thousand objects, and all of them stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _about_the_store(out: Path) -> list[str]:
    """What was wrong with the store, in at most one line, however many workers found it so."""
    noted = lines(out, words=('"store"',))
    return [str(row["detail"]) for _, row in noted if row is not None and row.get("kind") == "store"][:1]


def _folder(options: argparse.Namespace) -> Path:
    """Where records go. A replayed case must not wipe out the run that it comes from."""
    chosen: Path | None = options.records
    if chosen is None:
        chosen = Path("out") if options.case is None else options.case.parent.parent / "replay"
    return chosen.absolute()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _clear(out: Path, replayed: Path | None) -> None:
    """Remove an earlier run's records and cases, and nothing else. WrongUse if the folder cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob("records-*.jsonl"):
            path.unlink()
        # A saved case that is being replayed must survive the run that replays it.
        keep = replayed.resolve().with_suffix("").name if replayed is not None else ""
        for path in (out / "cases").iterdir() if (out / "cases").is_dir() else ():
            if path.with_suffix("").name != keep:
                path.unlink()
    except OSError as error:
        raise WrongUse(f"cannot write records to {out}: {error.strerror or error}") from error


def _try_to_write(path: Path) -> None:
    try:
        path.write_text("[]\n", encoding="utf-8")
    except OSError as error:
        raise WrongUse(f"cannot write {path}: {error.strerror or error}") from error


def _pages(out: Path) -> tuple[tuple[Path, ...], str]:
    """The report's pages, and what went wrong with them: the verdicts stand without it."""
    try:
        return build(out), ""
    except OSError as error:
        return (), f"the report cannot be written: {error.strerror or error}"
    except Exception:
        traceback.print_exc()
        return (), "the report failed, the records are complete: please report this with the lines above"


def _targets(options: argparse.Namespace) -> int:
    rows = listing(options.targets, op=options.op, check=options.check)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        width = max(shutil.get_terminal_size((120, 20)).columns, 80)
        for row in rows:
            text = as_text(row)
            print(text[:width] if sys.stdout.isatty() and not row.get("problems") else text)
    return BROKEN if any(row.get("problems") for row in rows) else 0


def _report(folder: Path) -> int:
    if not folder.is_dir():
        raise WrongUse(f"no folder {str(folder)!r}")
    if not list(folder.glob("records-*.jsonl")):
        raise WrongUse(f"{folder} has no record files (records-*.jsonl)")
    try:
        pages = build(folder)
    except OSError as error:
        raise WrongUse(f"cannot write the report to {folder}: {error.strerror or error}") from error
    for page in pages:
        print(page)
    return 0


def _compare(options: argparse.Namespace) -> int:
    if not 1 <= options.factor < math.inf:
        raise WrongUse(f"--factor takes a number from 1, got {options.factor:g}")
    how = {name: getattr(options, name) for name in ("factor", "exact", "common", "across_versions")}
    found = compare(options.old, options.new, **how)
    if options.json is not None:
        _try_to_write(options.json)
        options.json.write_text(json.dumps(document(found), indent=1) + "\n", encoding="utf-8")
    print(changes(found))
    return BROKEN if found.worse else 0


if __name__ == "__main__":
    raise SystemExit(run())
