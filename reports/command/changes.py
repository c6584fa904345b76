"""What `attn-oracle compare` says: one line a changed record, the worst first; and the same as a JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping

from properties.record import Record
from reports.run.compare import Comparison, change, is_worse
from reports.run.matching import Pair

_WIDTH = 100


def changes(found: Comparison, *, most: int = 20) -> str:
    """The comparison as text, at most ``most`` lines of each list."""
    lines = [f"old: {found.old}, commit {found.commits[0]}", f"new: {found.new}, commit {found.commits[1]}"]
    lines += found.notes
    for title, pairs in lists(found).items():
        # Differences that do not count are counted only.
        shown = 0 if pairs is found.inexact and not found.exact else most
        lines += [f"{title}: {len(pairs)}"] if pairs else []
        lines += [f"  {_line(p)}" for p in pairs[:shown]]
        if len(pairs) > shown > 0:
            lines.append(f"  ... and {len(pairs) - shown} more")
    what = "different" if found.exact else "worse"
    lines.append(f"{found.common} records in both runs; {what}: {found.worse or 'none'}")
    return "\n".join(lines)


def lists(found: Comparison) -> Mapping[str, tuple[Pair, ...]]:
    """The lists of a comparison by what they are called, in the order in which they are read."""
    factor = f"by more than a factor of {found.factor:g}"
    return {
        "new failures": found.failures,
        f"error/bound grown {factor}": found.grown,
        "worse verdicts": tuple(p for p in found.verdicts if is_worse(p)),
        "asked no more": found.gone,
        "other changes of verdict": tuple(p for p in found.verdicts if not is_worse(p)),
        "cured": found.cured,
        f"error/bound shrunk {factor}": found.shrunk,
        "asked newly": found.fresh,
        "other differences of error/bound or of the case": found.inexact,
    }


def document(found: Comparison) -> dict[str, object]:
    """The comparison, whole, JSON-ready: figures that are not finite are strings."""
    return {
        "old": str(found.old),
        "new": str(found.new),
        "commits": list(found.commits),
        "notes": list(found.notes),
        "common": found.common,
        "worse": found.worse,
        "factor": found.factor,
        "exact": found.exact,
        "lists": {title: [_row(p) for p in pairs] for title, pairs in lists(found).items()},
    }


def _row(p: Pair) -> dict[str, object]:
    r = p.record
    named = {n: getattr(r, n) for n in ("target", "origin", "op", "dtype", "device", "property", "title")}
    return {**named, "old": _side(p.old), "new": _side(p.new)}


def _side(r: Record | None) -> dict[str, object] | None:
    if r is None:
        return None
    ratio = str(r.ratio) if r.ratio is not None and not math.isfinite(r.ratio) else r.ratio
    return {"verdict": r.verdict, "ratio": ratio, "case": r.case, "description": r.description, "detail": r.detail}


def _line(p: Pair) -> str:
    r = p.record
    cases = list(dict.fromkeys(one.case or "no case" for one in (p.old, p.new) if one is not None))
    exact = p.old is not None and p.new is not None and p.old.verdict == p.new.verdict and 0.99 < change(p) < 1.01
    text = f"{r.target} {r.op} {r.dtype} {r.property} case {' -> '.join(cases)}: "
    text += f"{_answer(p.old, exact=exact)} -> {_answer(p.new, exact=exact)}"
    if p.old is not None and p.new is not None and p.old.forms != p.new.forms and p.old.ratio == p.new.ratio:
        text += " (in another form)"
    said = " ".join((r.title if p.new is None else r.detail or r.title).split())
    return f"{text}; {said if len(said) <= _WIDTH else said[: _WIDTH - 3] + '...'}" if said else text


def _answer(r: Record | None, *, exact: bool) -> str:
    if r is None:
        return "not asked"
    ratio = "" if r.ratio is None else f" {r.ratio!r}" if exact else f" {r.ratio:.3g}"
    return f"{r.verdict}{ratio}"
