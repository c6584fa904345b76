"""The table of ops for readers, made from the rows; the README shows it, and a test compares."""

from __future__ import annotations

from collections.abc import Iterable

from oracle.ops.op import shown
from oracle.ops.table import ops

_KINDS = {"positions": " int64", "index": " int32"}


def as_markdown() -> str:
    """Of each op: what a function must take, what it returns, and which options it may have."""
    lines = ["| op | required parameters | returns | options it may take |", "|---|---|---|---|"]
    for name, row in ops().items():
        taken = (f"{n} {shown(a.dims)}{_KINDS.get(a.kind, '')}" for n, a in row.arrays.items())
        given = (f"{n} {shown(dims)}" for n, dims in row.results.items())
        options = [n for n in (*row.options, "return_lse") if n in row.parameters]
        lines.append(f"| `{name}` | {_listed(taken)} | {_listed(given)} | {_listed(options)} |")
    return "\n".join(lines) + "\n"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
