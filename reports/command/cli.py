"""The ``attn-oracle`` command: parse, check what was asked, start pytest, a report or a comparison.

Exit codes: 0 all well; 1 any FAIL, ERROR or STALE_WAIVER, or worse than the run before; 2 wrong use; 3 an oracle or
internal fault, UNDECIDED, nothing checked, or interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from oracle.case import DamagedCase
from oracle.contract.contract import UnknownContract
from properties.record import DamagedRecords, Journal
from properties.subject import PROFILES
from properties.waivers import BadWaiver
from reports.command.changes import changes, document
from reports.command.conclude import conclude
from reports.command.environment import environment
from reports.command.listing import as_text, listing
from reports.command.request import WrongUse, check, left_out
from reports.command.terminal import summary
from reports.run.compare import ONE_BIT, compare
from reports.run.load import UnlikeRuns
from targets.calling.registry import Unavailable, UnknownTarget
from targets.calling.target import BadTarget

BROKEN, WRONG_USE, FAULT = 1, 2, 3
_PROGRAM = "attn-oracle"
# pytest's own exit codes.
_INTERRUPTED, _INTERNAL, _USAGE = 2, 3, 4


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Verify attention, softmax, RoPE and MLA kernels against proven enclosures."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="run the property suite on targets and write records and a report")
    add = verify.add_argument
    what = "built-in name, file.py:function or package.module:attr (none: all built-in)"
    add("targets", nargs="*", metavar="TARGET", help=what)
    add("--target", action="append", default=[], dest="more", metavar="TARGET", help="the same, as an option")
    add("--op", help="op of a target whose parameters do not say")
    add(
        "--dtype",
        action="append",
        default=[],
        help="fp64, fp32, fp16, bf16, e4m3 or e5m2; repeatable (default: the target's)",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--contract", help="hold the targets to this preset")
    add("--convention", action="append", default=[], metavar="NAME=VALUE", help="state a convention; repeatable")
    add("--profile", default="default", choices=sorted(PROFILES), help="how much to try")
    add("--seed", type=int, default=0, help="seed of every search")
    add("--property", action="append", default=[], dest="properties", metavar="ID", help="only this one; repeatable")
    add("--case", type=Path, help="examine this saved case only")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds that one call of a target may take (60)")
    add("--json", type=Path, metavar="FILE", help="also write all records to FILE as one JSON document")
    add("--out", type=Path, help="folder of records and report (out; with --case: replay, beside the case's folder)")
    add("--workers", type=int, help="worker processes (one a core); 0: none, and a target that dies takes all with it")
    listing = commands.add_parser("targets", help="what there is, what each supports, what is missing and why")
    listing.add_argument("targets", nargs="*", metavar="TARGET", help="only these (none: built-in ones and plug-ins)")
    listing.add_argument("--op", help="op of a target whose parameters do not say")
    listing.add_argument("--json", action="store_true")
    listing.add_argument(
        "--check", action="store_true", help="call each once per dtype and compare with its statements"
    )
    report = commands.add_parser("report", help="write report.md and report.html from the records of DIR")
    report.add_argument("folder", type=Path, metavar="DIR")
    against = commands.add_parser("compare", help="two runs record by record; 1 if the new one is worse")
    against.add_argument("old", type=Path, metavar="OLD", help="folder of the run before")
    against.add_argument("new", type=Path, metavar="NEW", help="folder of the run after")
    say = "how much error/bound may grow in a record (2: one bit)"
    against.add_argument("--factor", type=float, default=ONE_BIT, metavar="F", help=say)
    against.add_argument("--exact", action="store_true", help="any difference of verdict, case or figures counts")
    against.add_argument("--common", action="store_true", help="only what both asked, as where one run chose targets")
    against.add_argument("--across-versions", action="store_true", help="libraries and Python may differ")
    against.add_argument("--json", type=Path, metavar="FILE", help="also write all that changed to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
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
        print(f"{_PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return FAULT
    except Exception:
        # The interpreter's own exit code, 1, would read as a finding about a target.
        traceback.print_exc()
        print(f"{_PROGRAM}: an internal fault: please report it with the lines above", file=sys.stderr)
        return FAULT


def _verify(options: argparse.Namespace, words: list[str]) -> int:
    found = check(options)
    out = _folder(options)
    _clear(out, options.case)
    if options.json is not None:
        _try_to_write(options.json)
    run = Journal(out, "run")
    run.note("environment", environment(words, seed=options.seed, profile=options.profile, device=options.device))
    for name, reason in left_out(options, found):
        run.note("untested", {"target": name, "op": "", "dtype": "", "property": "", "reason": reason})
    run.close()
    code = _run_pytest(options, out)
    if code == _USAGE:
        return WRONG_USE
    whole = not options.properties and options.case is None and options.contract is None and not options.convention
    concluded = conclude(out, complete=whole and options.profile != "quick", interrupted=code == _INTERRUPTED)
    pages, fault = _pages(out)
    print("\n" + summary(concluded, pages))
    if options.json is not None:
        records = [_finite(asdict(r)) for r in concluded.records]
        options.json.write_text(json.dumps(records, indent=1, default=str) + "\n", encoding="utf-8")
    if code == BROKEN and concluded.code == 0:
        fault = "pytest reports a failure that no record explains"
    if code == _INTERNAL:
        fault = "pytest stopped with an internal error (above)"
    if fault:
        print(f"{_PROGRAM}: {fault}", file=sys.stderr)
        return FAULT
    return concluded.code


def _folder(options: argparse.Namespace) -> Path:
    """Where records go. A replayed case must not wipe out the run that it comes from."""
    chosen: Path | None = options.out
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


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """The user's own pytest settings and plug-ins kept out, one thread a worker; all as before afterwards."""
    before = dict(os.environ)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if workers > 1:
        # Several workers of several threads each only wait for one another.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_pytest(options: argparse.Namespace, out: Path) -> int:
    import pytest

    import properties

    folder = Path(properties.__file__).parent
    workers = options.workers if options.workers is not None else min(_cores(), 8)
    # Hangs end after --timeout, call by call; this only ends a check that will not end otherwise.
    limit = {"quick": 1800, "default": 7200, "deep": 86400}[options.profile]
    arguments = [
        str(folder),
        "-p", "properties.plugin", "-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:faulthandler",
        "-c", str(folder / "suite.ini"),
        f"--rootdir={folder}",
        "-q", "--no-header", "-rN", "--tb=no",
        f"--timeout={limit}", "--timeout-method=thread",
        f"--records={out}",
        f"--profile={options.profile}",
        f"--seed={options.seed}",
        f"--device={options.device}",
        f"--call-seconds={options.timeout}",
    ]  # fmt: skip
    # Workers that die are replaced as often as it takes: a target is given up after a few lost calls.
    arguments += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart=9999"] if workers > 0 else []
    arguments += [f"--target={s}" for s in (*options.targets, *options.more)]
    arguments += [f"--dtype={d}" for d in options.dtype]
    arguments += [f"--convention={c}" for c in options.convention]
    arguments += [f"--property={p}" for p in options.properties]
    arguments += [f"--op={options.op}"] if options.op else []
    arguments += [f"--contract={options.contract}"] if options.contract else []
    arguments += [f"--case={options.case}"] if options.case else []
    with _environment(workers):
        return int(pytest.main(arguments))


def _pages(out: Path) -> tuple[tuple[Path, ...], str]:
    """The report's pages, and what went wrong with them: the verdicts stand without it."""
    from reports.page.build import build

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
    from reports.page.build import build

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
    raise SystemExit(main())
