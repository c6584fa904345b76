"""The list of targets: what there is, what each supports, what is missing and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from targets.calling.registry import BUILTINS, Unavailable, plugins, resolve
from targets.calling.target import BadTarget
from targets.probing.conformance import check_target


def listing(specs: Sequence[str], *, op: str | None = None, check: bool = False) -> list[dict[str, object]]:
    """One JSON-ready row a target: the named ones, or all built-in ones and plug-ins. With ``check``: do they conform?

    UnknownTarget, BadTarget or Unavailable for a named one; of the others the row says what is missing.
    """
    return [_row(spec, spec in specs, op, check) for spec in specs or (*(b.name for b in BUILTINS), *plugins())]


def _row(spec: str, named: bool, op: str | None, check: bool) -> dict[str, Any]:
    try:
        target = resolve(spec, op=op)
    except (Unavailable, BadTarget) as error:
        if named:
            raise
        return {"name": spec, "missing": str(error)}
    row = {
        "name": target.name,
        "origin": target.origin,
        "op": target.op,
        "dtypes": list(target.dtypes),
        "devices": list(target.devices),
        "options": sorted(set(target.parameters) - set(target.row.inputs)),
        "description": target.description,
    }
    if check and "cpu" in target.devices:
        row["problems"] = check_target(target)
    return row


def as_text(row: dict[str, Any]) -> str:
    """A row as a line, and one more for each thing in which the target does not conform."""
    if "missing" in row:
        return f"{row['name']:<22} not available: {row['missing']}"
    devices = "/".join(row["devices"])
    line = f"{row['name']:<22} {row['op']:<12} {' '.join(row['dtypes']):<20} {devices:<9} {' '.join(row['options'])}"
    return "\n".join([line.rstrip(), *(f"  does not conform: {problem}" for problem in row.get("problems", ()))])
