"""What a failing check says: a text that stands alone, and the command that reruns it."""

from __future__ import annotations

import math
import re
import shlex

from properties.judge.verdict import Basis, Verdict
from properties.record import Record
from properties.subject import Subject

REPLAY = "out/replay"


def rerun_command(subject: Subject, property_id: str, seed: int, stem: str | None) -> str:
    """The shell command that repeats one check: on the saved case, or by the search that found it.

    It writes its records elsewhere than the run that it repeats a part of.
    """
    target = subject.target
    words = [
        "attn-oracle",
        "verify",
        target.spec,
        "--dtype",
        subject.dtype,
        *(("--property", property_id) if property_id != "probe" else ()),
        *target.session.words,
    ]
    if target.forward is not None and "--op" not in words:
        words += ["--op", target.op]
    if subject.device != "cpu":
        words += ["--device", subject.device]
    words += ["--case", stem] if stem else ["--profile", subject.profile.name, "--seed", str(seed), "--out", REPLAY]
    return shlex.join(words)


def filed_under(record: Record) -> str:
    """What a failure of a target is counted as: its diagnosis where there is one, what went wrong where no result came,
    else the property that broke. Failures of one target that are filed alike are told once."""
    if record.verdict == Verdict.ERROR.value:
        return record.detail
    named = record.diagnosis.partition("as if ")
    return f"as if {named[2]}" if named[1] else f"{record.property}: {record.title}"


def same_defect(record: Record) -> tuple[str, str]:
    """What failures that are told once share: the target, and `filed_under` whatever the numbers in it."""
    text = re.sub(r"\b(\w+) was\b", r"# \1s were", filed_under(record)) if "as if " in record.diagnosis else ""
    return record.target, re.sub(r"\d+", "#", text) or filed_under(record)


def failure_message(record: Record) -> str:
    """Op, target, dtype, input, exact value, observed value, error, bound and its reason, and the rerun command."""
    lines = [
        f"{record.verdict}: {record.target} ({record.op}, {record.dtype}, {record.device}) breaks {record.property}"
        + (f": {record.title}" if record.title else ""),
        f"  what     {record.detail}",
    ]
    if record.description:
        lines.append(f"  case     {record.description}")
    facts = ", ".join(f"{k}={v}" for k, v in record.features.items())
    if facts:
        lines.append(f"  made of  {facts}")
    lines += [f"  {text}" for text in worst_lines(record)]
    lines += [f"  bound    {text}" for text in bound_lines(record)]
    if record.diagnosis:
        lines.append(f"  looks    {record.diagnosis}")
    if record.stem:
        lines.append(f"  saved    {record.stem}")
    if record.rerun:
        lines.append(f"  rerun    {record.rerun}")
    return "\n".join(lines)


def worst_lines(record: Record) -> list[str]:
    """The worst element: place, exact and observed value and their distance, in decimal and in hex."""
    worst = record.worst
    if not worst:
        return []
    place = f"{worst.get('output', 'out')}{list(worst.get('index', []))}"
    lines = [f"worst    {place}"]
    values = {name: _number(worst.get(name)) for name in ("exact", "observed", "gap")}
    if values["gap"] is None and values["exact"] is not None and values["observed"] is not None:
        values["gap"] = abs(values["observed"] - values["exact"])
    for name, label in (("exact", "exact"), ("observed", "observed"), ("gap", "error")):
        value = values[name]
        if value is not None and not (name == "gap" and math.isnan(value)):
            lines.append(f"         {label:<9}{value:.9g} ({value.hex()})")
    return lines


def bound_lines(record: Record) -> list[str]:
    """What the verdict rests on: the contract with the error in each of its forms, or the kind of property."""
    if record.forms:
        ratios = ", ".join(f"{label} {ratio:.3g}" for label, ratio in record.forms.items())
        why = {
            Basis.DERIVED.value: f"derived from contract {record.contract}",
            Basis.CALIBRATED.value: f"calibrated on honest kernels of contract {record.contract}",
            Basis.EXACT.value: f"contract {record.contract}, and a convention that holds exactly",
        }[record.basis]
        return [f"{why}; error/bound by form: {ratios}"]
    if record.ratio is not None:
        return [f"{record.basis}; error/bound {record.ratio:.3g}"]
    exact = record.basis == Basis.EXACT.value and record.verdict == Verdict.FAIL.value
    return ["none: this holds exactly or not at all"] if exact else []


def _number(text: object) -> float | None:
    """A value from its hex form (or from "inf", "nan"); None if there is none."""
    if text is None:
        return None
    try:
        return float.fromhex(str(text))
    except (ValueError, OverflowError):
        return None if not isinstance(text, float) else text if math.isfinite(text) else None
