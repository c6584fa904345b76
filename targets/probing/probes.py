"""Tiny calls that find out what a target does where implementations legitimately differ.

A probe asks only which of the published conventions an output follows; it never fails a target, and what no probe can
tell stays unknown. A refusal (of grouped heads, of masks of a shape or kind) is a stated limit. Alignment is asked with
Sq = 2, Sk = 3; the LSE's base with one key; the value of an empty row with a mask, or else with more queries than keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import StoredArray, beside
from oracle.ops.op import Limit, Op
from oracle.ops.table import op_named
from targets.calling.target import Observed, Target, run
from targets.probing.asked import Asked, asked_of
from targets.probing.option_probes import OPTION_PROBES, alignment, empty_by_window
from targets.probing.tiny import tiny_case

Probe = Callable[[Asked], str | None]
_CLOSE = 0.05


def returns_lse_unasked(target: Target, dtype: str, *, device: str = "cpu") -> bool:
    """Whether the target has no ``return_lse`` and yet returns, after the output, something of the LSE's shape."""
    if not target.row.attends or "return_lse" in target.parameters:
        return False
    return "lse" in asked_of(target, dtype, device=device)[1].outputs


def probe(target: Target, dtype: str, *, device: str = "cpu") -> dict[str, str]:
    """All conventions of the target: the declared ones as they are, the others as probed."""
    found = dict(target.conventions)
    probes = probes_of(target.row)
    missing = [name for name in probes if name not in found]
    if missing:
        asked, seen = asked_of(target, dtype, device=device)
        # A target that does not even take an ordinary call tells nothing by refusing others.
        for name in missing if seen.fault is None else ():
            answer = probes[name](asked)
            if answer is not None:
                found[name] = answer
    return found


def contradictions(target: Target, dtype: str, *, device: str = "cpu") -> list[str]:
    """Declared conventions that a probe answers otherwise, each in one line."""
    probed = probe(replace(target, conventions={}), dtype, device=device)
    return [
        f"convention {name} is declared {stated}, but tiny calls show {probed[name]}"
        for name, stated in target.conventions.items()
        # What is not to be asked need not fail when it is.
        if name in probed and probed[name] != stated and stated != "refused"
    ]


def _float(array: StoredArray) -> NDArray[np.float64]:
    return array.astype(np.float64)


def _exact(case: Case, shape: tuple[int, ...]) -> NDArray[np.float64]:
    name = _first_output(case)
    return np.stack([b.part(name).hi for b in enclose(case) if b.holds(name)]).reshape(shape)


def _first_output(case: Case) -> str:
    return op_named(case.op).outputs[0]


def _follows(seen: Observed, case: Case) -> bool:
    """Whether the output is the exact result of ``case``, as far as so short a look can tell."""
    if seen.fault is not None:
        return False
    out = _float(seen.outputs[_first_output(case)])
    return bool(out.size and np.allclose(out, _exact(case, out.shape), atol=_CLOSE, rtol=_CLOSE))


def _alignment(asked: Asked) -> str | None:
    known = asked.target.row.conventions["causal_alignment"]
    if len(known) == 1:
        # Its queries are the last positions by definition.
        return known[0]
    if not asked.has("is_causal"):
        return alignment(asked)
    for aligned in known:
        case, seen = asked.call(is_causal=True, causal_alignment=aligned)
        if _follows(seen, case):
            return aligned
    return None


def _lse_name(asked: Asked) -> str:
    """The output that is a log-sum-exp."""
    return "lse" if asked.target.row.attends else "out"


def _lse_base(asked: Asked) -> str | None:
    name = _lse_name(asked)
    one_key = {"queries": 1, "keys": 1, "scale": 1.0 if asked.has("scale") else None}
    case, seen = asked.call(**one_key if asked.target.row.attends else {})
    given, exact = seen.outputs.get(name), enclose(case)[0].part(name).hi.reshape(-1)
    if seen.fault is not None or given is None or given.size != exact.size:
        return None
    lse = _float(given).reshape(-1)
    for base, factor in (("e", 1.0), ("2", float(np.log(2.0)))):
        if np.allclose(lse * factor, exact, atol=0.0, rtol=_CLOSE):
            return base
    return None


def _without_keys(asked: Asked) -> tuple[Case, Observed, int] | None:
    """A call with an empty row: its case, what came of it, and which row is empty."""
    if not asked.target.row.attends:
        case = tiny_case(asked.target.op, asked.dtype, width=asked.width)
        x = case.arrays["x"].copy()
        x[1] = -np.inf
        case = case.with_arrays(x=x)
        return case, run(asked.target, case, device=asked.device), 1
    if asked.has("attn_mask"):
        mask = np.array([[[[True, True, True], [False, False, False]]]])
        case, seen = asked.call(attn_mask=mask)
        if seen.fault is None:
            return case, seen, 1
    # Two queries, one key: the first row is empty where the alignment is bottom_right.
    aligned = _alignment(asked)
    if asked.has("is_causal") and aligned == "bottom_right":
        case, seen = asked.call(keys=1, is_causal=True, causal_alignment="bottom_right")
        if seen.fault is None:
            return case, seen, 0
    return empty_by_window(asked, aligned)


def _empty_row(asked: Asked) -> str | None:
    called = _without_keys(asked)
    if called is None or called[1].fault is not None:
        return None
    case, seen, place = called
    out = _float(seen.outputs["out"])
    row = out.reshape(-1, out.shape[-1])[place]
    if np.isnan(row).all():
        return "nan"
    if np.all(row == 0):
        return "zero"
    if "v" in case.arrays:
        mean = _float(case.arrays["v"][0, 0]).mean(axis=0)
        return "mean" if row.shape == mean.shape and np.allclose(row, mean, atol=_CLOSE) else None
    return "mean" if "x" in case.arrays and np.allclose(row, 1 / row.size, rtol=_CLOSE) else None


def _empty_row_lse(asked: Asked) -> str | None:
    called = _without_keys(asked)
    name = _lse_name(asked)
    if called is None or called[1].fault is not None or name not in called[1].outputs:
        return None
    value = float(_float(called[1].outputs[name]).reshape(-1)[called[2]])
    if np.isnan(value):
        return None
    return "finite" if np.isfinite(value) else ("+inf" if value > 0 else "-inf")


def _limit(limit: Limit) -> Probe:
    """Asks whether every tiny call beyond the limit is refused: by an exception, or, of the form of an option, by an
    output of another shape, which is what comes of taking one form for another."""

    def asks(asked: Asked) -> str | None:
        if limit.option and not asked.has(limit.option):
            return None
        calls = limit.asked(asked.width, beside(asked.dtype))
        refused = (_refuses(*asked.call(**call), by_shape=bool(limit.option)) for call in calls)
        return "refused" if all(refused) else "accepted"

    return asks


def _refuses(case: Case, seen: Observed, *, by_shape: bool) -> bool:
    if seen.fault is not None:
        return seen.fault[0] == "raised"
    shapes = op_named(case.op).output_shapes(case)
    return by_shape and any(tuple(value.shape) != shapes.get(name) for name, value in seen.outputs.items())


def _layout(asked: Asked) -> str | None:
    if asked.has("layout"):
        return None
    for layout in ("half", "interleaved"):
        case, seen = asked.call(layout=layout)
        if _follows(seen, case):
            return layout
    return None


# Those that a gradient shows as well; the others read the output or the LSE.
_OF_ANY_OUTPUT: Mapping[str, Probe] = {
    "causal_alignment": _alignment,
    "layout": _layout,
}
_PROBES: Mapping[str, Probe] = {
    **_OF_ANY_OUTPUT,
    **OPTION_PROBES,
    "lse_base": _lse_base,
    "empty_row": _empty_row,
    "empty_row_lse": _empty_row_lse,
}


def probes_of(row: Op) -> Mapping[str, Probe]:
    """The probes of an op's conventions; one that no probe tells stays as stated."""
    limits = {name: _limit(limit) for name, limit in row.limits.items()}
    known = {**limits, **(_PROBES if row.gradient is None else _OF_ANY_OUTPUT)}
    return {name: known[name] for name in row.conventions if name in known}
