"""What a failing check says: a text that stands alone, and the command that reruns it."""

from __future__ import annotations

import shlex

from properties.bench import Bench
from properties.record import Record


def rerun_command(bench: Bench, property_id: str, seed: int, stem: str | None) -> str:
    """The shell command that repeats one check: on the saved case, or by the search that found it."""
    words = [
        "attn-oracle",
        "verify",
        bench.target.spec,
        "--op",
        bench.op,
        "--dtype",
        bench.dtype,
        "--property",
        property_id,
    ]
    if bench.device != "cpu":
        words += ["--device", bench.device]
    words += ["--case", stem] if stem else ["--profile", bench.profile.name, "--seed", str(seed)]
    return shlex.join(words)


def failure_message(record: Record) -> str:
    """Op, target, dtype, input, exact value, observed value, error, bound and its reason, and the rerun command."""
    lines = [
        f"{record.verdict}: {record.target} ({record.op}, {record.dtype}) breaks {record.property}: {record.title}",
        f"  what     {record.detail}",
        f"  case     {record.description}",
    ]
    facts = ", ".join(f"{k}={v}" for k, v in record.features.items())
    if facts:
        lines.append(f"  made of  {facts}")
    lines += [f"  {text}" for text in worst_lines(record)]
    if record.forms:
        ratios = ", ".join(f"{label} {ratio:.3g}" for label, ratio in record.forms.items())
        lines.append(f"  bound    contract {record.contract} ({record.basis}); error/bound by form: {ratios}")
    if record.stem:
        lines.append(f"  saved    {record.stem}")
    lines.append(f"  rerun    {record.rerun}")
    return "\n".join(lines)


def worst_lines(record: Record) -> list[str]:
    """The worst element: place, exact and observed value, in decimal and in hex."""
    worst = record.worst
    if not worst:
        return []
    place = f"{worst.get('output', 'out')}{list(worst.get('index', []))}"
    lines = [f"worst    {place}"]
    for name in ("exact", "observed"):
        if worst.get(name) is not None:
            text = str(worst[name])
            lines.append(f"         {name:<9}{_decimal(text)} ({text})")
    return lines


def _decimal(text: str) -> str:
    try:
        return f"{float.fromhex(text):.9g}"
    except ValueError:
        return text
