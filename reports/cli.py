"""The ``attn-oracle`` command: parse, check what was asked, start pytest or a report. Exit codes: 0 all well; 1 any FAIL, ERROR or
STALE_WAIVER; 2 wrong use; 3 an oracle or internal fault, UNDECIDED, or nothing checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from oracle.bounds.contract import PRESETS, UnknownContract, declared_forms
from oracle.case import DamagedCase, load_case
from oracle.formats import STORAGE
from properties.bench import PROFILES
from properties.property import properties_for
from properties.record import Journal
from properties.waivers import BadWaiver, waivers_of
from reports.conclude import conclude
from reports.environment import environment
from reports.terminal import summary
from targets.base import INPUTS, BadTarget, Target
from targets.registry import BUILTINS, Unavailable, UnknownTarget, load_builtin, resolve

WRONG_USE, FAULT = 2, 3
_PROGRAM = "attn-oracle"


class WrongUse(ValueError):
    """A request that cannot be carried out as asked; one line."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Verify attention, softmax, RoPE and MLA kernels against proven enclosures."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="run the property suite on targets and write records and a report")
    verify.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="built-in name, file.py:function or package.module:attr (none: all built-in)",
    )
    verify.add_argument(
        "--target", action="append", default=[], dest="more", metavar="TARGET", help="the same, as an option"
    )
    verify.add_argument("--op", help="op of a target whose parameters do not say")
    verify.add_argument("--dtype", action="append", default=[], help="fp64, fp32, fp16 or bf16; repeatable")
    verify.add_argument("--device", default="cpu", help="cpu or cuda")
    verify.add_argument("--contract", help="hold the targets to this preset")
    verify.add_argument("--convention", action="append", default=[], metavar="NAME=VALUE")
    verify.add_argument("--profile", default="default", choices=sorted(PROFILES))
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument(
        "--property",
        action="append",
        default=[],
        dest="properties",
        metavar="ID",
        help="only this property; repeatable",
    )
    verify.add_argument("--case", type=Path, help="examine this saved case only")
    verify.add_argument("--json", type=Path, metavar="FILE", help="also write all records to FILE as one JSON document")
    verify.add_argument("--out", type=Path, default=Path("out"), help="folder of records and report (default: out)")
    verify.add_argument("--workers", type=int, default=None, help="worker processes (default: one a core)")
    listing = commands.add_parser("targets", help="what there is, what each supports, what is missing and why")
    listing.add_argument("--json", action="store_true")
    report = commands.add_parser("report", help="write report.md and report.html from the records of DIR")
    report.add_argument("folder", type=Path, metavar="DIR")
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
                return _targets(as_json=options.json)
            case "report":
                return _report(options.folder)
            case other:
                raise WrongUse(f"unknown command {other!r}")
    except (WrongUse, UnknownTarget, BadTarget, Unavailable, UnknownContract, DamagedCase, BadWaiver) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return WRONG_USE


def _check(options: argparse.Namespace) -> list[Target]:
    """Everything that can be wrong with a request, said in one line before anything runs."""
    for dtype in options.dtype:
        if dtype not in STORAGE:
            raise WrongUse(f"unknown dtype {dtype!r}; known: {', '.join(STORAGE)}")
    if options.op is not None and options.op not in INPUTS:
        raise WrongUse(f"unknown op {options.op!r}; known: {', '.join(INPUTS)}")
    for item in options.convention:
        if "=" not in item:
            raise WrongUse(f"--convention takes NAME=VALUE, got {item!r}")
    if options.device != "cpu" and not options.device.startswith("cuda"):
        raise WrongUse(f"unknown device {options.device!r}; known: cpu, cuda")
    if options.device.startswith("cuda") and not _has_cuda():
        raise WrongUse("--device cuda: torch sees no CUDA device here")
    found = [resolve(spec, op=options.op) for spec in (*options.targets, *options.more)]
    for target in found:
        waivers_of(target.name)
        if options.contract is not None:
            if options.contract not in PRESETS[target.op]:
                raise WrongUse(
                    f"unknown contract {options.contract!r} for {target.op}; known: {', '.join(PRESETS[target.op])}"
                )
        elif target.contract is not None:
            declared_forms(
                target.op, target.contract if isinstance(target.contract, str) else dict(target.contract), "fp32"
            )
        if not properties_for(target.op):
            raise WrongUse(f"op {target.op} has no property yet")
    ops = {t.op for t in found} or set(INPUTS)
    known = {p.id for op in ops for p in properties_for(op)}
    for name in options.properties:
        if name not in known:
            raise WrongUse(f"unknown property {name!r}; known: {', '.join(sorted(known, key=_order))}")
    if options.case is not None:
        saved = load_case(options.case)
        if not found or not options.properties:
            raise WrongUse("--case needs a TARGET and a --property")
        if any(t.op != saved.op for t in found):
            raise WrongUse(f"the saved case is of op {saved.op}, the target of {found[0].op}")
    return found


def _order(property_id: str) -> tuple[str, int]:
    return property_id[0], int(property_id[1:])


def _has_cuda() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


def _verify(options: argparse.Namespace, words: list[str]) -> int:
    found = _check(options)
    out: Path = options.out
    _clear(out)
    run = Journal(out, "run")
    run.note("environment", environment(words, seed=options.seed, profile=options.profile, device=options.device))
    if not found:
        for builtin in BUILTINS:
            reason = _why_not(builtin, options.device)
            if reason:
                run.note("untested", {"target": builtin.name, "op": "", "dtype": "", "property": "", "reason": reason})
    run.close()
    code = _run_pytest(options, [*options.targets, *options.more])
    if code in (pytest_usage(), FAULT):
        return WRONG_USE if code == pytest_usage() else FAULT
    complete = not options.properties and options.case is None and options.contract is None and not options.convention
    concluded = conclude(out, complete=complete and options.profile != "quick")
    pages = _build(out)
    print("\n" + summary(concluded, pages))
    if options.json is not None:
        options.json.write_text(
            json.dumps([_finite(asdict(r)) for r in concluded.records], indent=1, default=str) + "\n"
        )
    return concluded.code


def pytest_usage() -> int:
    """pytest's exit code for wrong use."""
    return 4


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return (
        str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) or value != value else value
    )


def _clear(out: Path) -> None:
    """Remove an earlier run's records and cases, and nothing else."""
    for path in out.glob("records-*.jsonl") if out.is_dir() else ():
        path.unlink()
    if (out / "cases").is_dir():
        # A saved case that is being replayed must survive the run that replays it.
        keep = {Path(w).resolve().stem for w in sys.argv if w.endswith(".json")}
        for path in (out / "cases").iterdir():
            if path.stem not in keep:
                path.unlink()


def _why_not(builtin: object, device: str) -> str:
    from targets.registry import Builtin

    assert isinstance(builtin, Builtin)
    try:
        target = load_builtin(builtin)
    except (Unavailable, ModuleNotFoundError) as error:
        return str(error)
    return (
        "" if device.split(":")[0] in target.devices else f"runs on {', '.join(target.devices)} only, not on {device}"
    )


def _run_pytest(options: argparse.Namespace, specs: list[str]) -> int:
    import pytest

    import properties

    folder = Path(properties.__file__).parent
    workers = options.workers if options.workers is not None else min(os.cpu_count() or 1, 8)
    if workers > 1:
        # One thread a worker: several workers of several threads each only wait for one another.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    limit = {"quick": 120, "default": 600, "deep": 7200}[options.profile]
    arguments = [
        str(folder),
        "-p", "properties.plugin",
        "-c", str(folder / "suite.ini"),
        f"--rootdir={folder}",
        "-q", "--no-header", "-rN", "--tb=no",
        f"--timeout={limit}", "--timeout-method=thread",
        f"--records={options.out}",
        f"--profile={options.profile}",
        f"--seed={options.seed}",
        f"--device={options.device}",
    ]  # fmt: skip
    arguments += ["-n", str(workers), "--dist", "worksteal"] if workers > 0 else []
    arguments += [f"--target={s}" for s in specs]
    arguments += [f"--dtype={d}" for d in options.dtype]
    arguments += [f"--convention={c}" for c in options.convention]
    arguments += [f"--property={p}" for p in options.properties]
    arguments += [f"--op={options.op}"] if options.op else []
    arguments += [f"--contract={options.contract}"] if options.contract else []
    arguments += [f"--case={options.case}"] if options.case else []
    return int(pytest.main(arguments))


def _build(out: Path) -> tuple[Path, ...]:
    from reports.build import build

    return build(out)


def _targets(*, as_json: bool) -> int:
    rows = []
    for builtin in BUILTINS:
        try:
            target = load_builtin(builtin)
        except (Unavailable, ModuleNotFoundError) as error:
            rows.append({"name": builtin.name, "origin": builtin.origin, "missing": str(error)})
            continue
        rows.append(
            {
                "name": target.name,
                "origin": target.origin,
                "op": target.op,
                "dtypes": list(target.dtypes),
                "devices": list(target.devices),
                "options": sorted(set(target.parameters) - set(INPUTS[target.op])),
                "description": target.description,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    width = shutil.get_terminal_size((120, 20)).columns
    for row in rows:
        if "missing" in row:
            text = f"{row['name']:<22} not available: {row['missing']}"
        else:
            devices = "/".join(row["devices"])
            text = f"{row['name']:<22} {row['op']:<12} {' '.join(row['dtypes']):<20} {devices:<9} {' '.join(row['options'])}"
        print(text[: max(width, 80)] if sys.stdout.isatty() else text)
    return 0


def _report(folder: Path) -> int:
    if not folder.is_dir():
        raise WrongUse(f"no folder {str(folder)!r}")
    if not list(folder.glob("records-*.jsonl")):
        raise WrongUse(f"{folder} has no record files (records-*.jsonl)")
    for page in _build(folder):
        print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
