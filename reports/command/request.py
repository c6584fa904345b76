"""What can be wrong with a request to verify targets, found and said before anything runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from oracle.case import load_case
from oracle.formats import INPUTS as DTYPES
from oracle.formats import format_of
from oracle.ops.table import op_named, ops
from properties.ops.table import properties_for
from properties.waivers import waivers_of
from reports.command.terminal import property_order
from targets.calling.metadata import wrong_convention
from targets.calling.registry import BUILTINS, Builtin, Unavailable, load_builtin, resolve_all
from targets.calling.target import Target


class WrongUse(ValueError):
    """A request that cannot be carried out as asked; one line."""


def check(options: argparse.Namespace) -> list[Target]:
    """The targets that are asked for (none: all built-in). WrongUse, in one line, for anything that cannot be done."""
    for dtype in options.dtype:
        if dtype not in DTYPES:
            raise WrongUse(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if options.op is not None and options.op not in ops():
        raise WrongUse(f"unknown op {options.op!r}; known: {', '.join(ops())}")
    if options.call_seconds <= 0 or not math.isfinite(options.call_seconds):
        raise WrongUse(f"--timeout takes a positive number of seconds, got {options.call_seconds:g}")
    if options.workers is not None and options.workers < 0:
        raise WrongUse(f"--workers takes a number from 0, got {options.workers}")
    _check_device(options.device)
    found = of_case(resolve_all(options.target, op=options.op), options.case)
    asked = {t.op for t in found} or ({options.op} if options.op else set(ops()))
    for target in found:
        if options.device.partition(":")[0] not in target.devices:
            raise WrongUse(f"{target.name} runs on {', '.join(target.devices)}, not on {options.device}")
        if not properties_for(target.op):
            raise WrongUse(f"op {target.op} has no property yet")
    for name in {t.name for t in found if t.origin == "third_party"} or {b.name for b in BUILTINS}:
        waivers_of(name)
    _check_dtypes(options, found)
    _check_statements(options, asked)
    if options.case is not None:
        _check_case(options, found)
    return found


def of_case(found: list[Target], case: Path | None) -> list[Target]:
    """Without the gradients of targets where a saved case is of the forward op; and the other way round."""
    if case is None:
        return found
    op = load_case(case).op
    return [t for t in found if t.op == op] or found


def _check_device(device: str) -> None:
    family, _, index = device.partition(":")
    if family not in ("cpu", "cuda") or (device != family and not (family == "cuda" and index.isdigit())):
        raise WrongUse(f"unknown device {device!r}; known: cpu, cuda, cuda:N")
    if family == "cuda":
        count = _cuda_devices()
        if not count:
            raise WrongUse("--device cuda: torch sees no CUDA device here")
        if index and int(index) >= count:
            raise WrongUse(f"--device {device}: torch sees {count} CUDA devices")


def _cuda_devices() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_dtypes(options: argparse.Namespace, found: list[Target]) -> None:
    """Each dtype asked for must be one that some target may take; what only others take is reported as untested."""
    for dtype in options.dtype if found else ():
        if all(dtype not in t.row.formats for t in found):
            raise WrongUse(f"{', '.join(dict.fromkeys(t.op for t in found))} takes no {dtype} inputs here")
        if all("dtypes" in t.stated and dtype not in t.dtypes for t in found):
            known = ", ".join(dict.fromkeys(d for t in found for d in t.dtypes))
            raise WrongUse(f"{', '.join(t.name for t in found)} declares no {dtype}; it takes {known}")


def _check_statements(options: argparse.Namespace, ops: set[str]) -> None:
    if options.contract is not None:
        for op in sorted(ops):
            forms = op_named(op).presets.forms
            if options.contract not in forms:
                raise WrongUse(f"unknown contract {options.contract!r} for {op}; known: {', '.join(forms)}")
    for item in options.convention:
        name, equals, value = item.partition("=")
        if not equals:
            raise WrongUse(f"--convention takes NAME=VALUE, got {item!r}")
        for op in sorted(ops):
            wrong = wrong_convention(op, name, value)
            if wrong:
                raise WrongUse(wrong)
    known = {p.id for op in ops for p in properties_for(op)}
    for name in options.property:
        if name not in known:
            listed = ", ".join(sorted(known, key=property_order))
            raise WrongUse(f"unknown property {name!r} of {', '.join(sorted(ops))}; known: {listed}")


def _check_case(options: argparse.Namespace, found: list[Target]) -> None:
    saved = load_case(options.case)
    if not found or not options.property:
        raise WrongUse("--case needs a TARGET and a --property")
    for target in found:
        if target.op != saved.op:
            raise WrongUse(f"the saved case is of op {saved.op}, {target.name} of {target.op}")
    missing = [n for n in op_named(saved.op).inputs if n not in saved.arrays]
    if missing:
        raise WrongUse(f"the saved case {options.case} has no array {missing[0]!r}")
    dtype = format_of(saved.arrays[op_named(saved.op).inputs[0]]).name
    if any(d != dtype for d in options.dtype):
        raise WrongUse(f"the saved case {options.case} is in {dtype}, not in {', '.join(options.dtype)}")
    options.dtype = [dtype]


def left_out(options: argparse.Namespace, found: list[Target]) -> Iterator[tuple[str, str]]:
    """Targets, and dtypes of targets, that this run does not ask about, with the reason."""
    if not found:
        for builtin in BUILTINS:
            reason = _why_not(builtin, options.device)
            if reason:
                yield builtin.name, reason
    for target in found:
        for dtype in options.dtype:
            if dtype not in target.row.formats:
                yield target.name, f"{target.op} takes no {dtype} inputs here"
            elif "dtypes" in target.stated and dtype not in target.dtypes:
                yield target.name, f"takes {', '.join(target.dtypes)}, not {dtype}"


def _why_not(builtin: Builtin, device: str) -> str:
    if builtin.by_name:
        return builtin.by_name
    try:
        target = load_builtin(builtin)
    except Unavailable as error:
        return str(error)
    family = device.partition(":")[0]
    return "" if family in target.devices else f"runs on {', '.join(target.devices)} only, not on {device}"
