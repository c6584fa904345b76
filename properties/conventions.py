"""Conventions that a target does not declare are probed once on tiny cases, then frozen and printed as its datasheet.

A probe asks only which of the published conventions the output follows; it never fails a target. What no probe can tell stays out of
the datasheet. A refusal (an exception on grouped heads, or on Dv != D) is a stated limit too: such cases are UNSUPPORTED, not
errors. Alignment is asked with Sq = 2, Sk = 3; the LSE's base with one key; the value of an empty row with a key mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.enclosure import enclose
from oracle.formats import FORMATS
from targets.base import Target, run

_CLOSE = 0.05


def _exact(case: Case) -> np.ndarray[Any, Any]:
    return np.stack([b.part("out").hi for b in enclose(case)])


def _attention_case(target: Target, dtype: str, sq: int, sk: int, **options: Any) -> Case:
    rng = np.random.default_rng(7)
    fmt = FORMATS[dtype]
    shapes = {"q": (1, 1, sq, 16), "k": (1, 1, sk, 16), "v": (1, 1, sk, 16)}
    return Case("attention", {n: fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, options)


def _alignment(target: Target, dtype: str, device: str) -> str | None:
    if "is_causal" not in target.parameters:
        return None
    for alignment in ("top_left", "bottom_right"):
        case = _attention_case(target, dtype, 2, 3, is_causal=True, causal_alignment=alignment)
        seen = run(target, case, device=device)
        if seen.fault is None and np.allclose(seen.outputs["out"][0].astype(np.float64), _exact(case), atol=_CLOSE):
            return alignment
    return None


def _lse_base(target: Target, dtype: str, device: str) -> str | None:
    seen = run(
        target,
        case := _attention_case(target, dtype, 1, 1, scale=1.0 if "scale" in target.parameters else None),
        device=device,
    )
    if seen.fault is not None or "lse" not in seen.outputs or seen.outputs["lse"].shape != (1, 1, 1):
        return None
    lse, exact = float(seen.outputs["lse"].reshape(-1)[0]), float(enclose(case)[0].part("lse").hi[0, 0])
    if abs(lse - exact) < _CLOSE * abs(exact):
        return "e"
    return "2" if abs(lse * np.log(2.0) - exact) < _CLOSE * abs(exact) else None


def _empty_row(target: Target, dtype: str, device: str) -> str | None:
    if "attn_mask" not in target.parameters:
        return None
    case = _attention_case(target, dtype, 2, 3, attn_mask=np.array([[[[True, True, True], [False, False, False]]]]))
    seen = run(target, case, device=device)
    if seen.fault is not None or seen.outputs["out"].shape != (1, 1, 2, 16):
        return None
    row = seen.outputs["out"][0, 0, 1].astype(np.float64)
    if np.isnan(row).all():
        return "nan"
    if np.all(row == 0):
        return "zero"
    mean = case.arrays["v"][0, 0].astype(np.float64).mean(axis=0)
    return "mean" if np.allclose(row, mean, atol=_CLOSE) else None


def _empty_row_lse(target: Target, dtype: str, device: str) -> str | None:
    if "return_lse" not in target.parameters:
        return None
    if "attn_mask" in target.parameters:
        case = _attention_case(target, dtype, 2, 3, attn_mask=np.array([[[[True, True, True], [False, False, False]]]]))
        row = 1
    elif "is_causal" in target.parameters:
        # Two queries, one key: the first row is empty where the alignment is bottom_right.
        case, row = _attention_case(target, dtype, 2, 1, is_causal=True), 0
        if _alignment(target, dtype, device) != "bottom_right":
            return None
    else:
        return None
    seen = run(target, case, device=device)
    if seen.fault is not None or "lse" not in seen.outputs or seen.outputs["lse"].shape != (1, 1, 2):
        return None
    value = float(seen.outputs["lse"][0, 0, row])
    if np.isnan(value):
        return None
    return "finite" if np.isfinite(value) else ("+inf" if value > 0 else "-inf")


def _masked_nan(target: Target, dtype: str, device: str) -> str | None:
    if "attn_mask" not in target.parameters:
        return None
    case = _attention_case(target, dtype, 2, 3, attn_mask=np.array([[[[True, True, False], [True, True, False]]]]))
    spoiled = case.arrays["v"].copy()
    spoiled[0, 0, 2] = np.nan
    seen = run(target, case.with_arrays(v=spoiled), device=device)
    if seen.fault is not None:
        return None
    return "leaks" if np.isnan(seen.outputs["out"].astype(np.float64)).any() else "blocked"


def _accepts(target: Target, dtype: str, device: str, *, heads: int, value_dims: int) -> str:
    fmt, rng = FORMATS[dtype], np.random.default_rng(7)
    shapes = {"q": (1, heads, 2, 16), "k": (1, 1, 2, 16), "v": (1, 1, 2, value_dims)}
    case = Case("attention", {n: fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, {})
    fault = run(target, case, device=device).fault
    return "refused" if fault is not None and fault[0] == "raised" else "accepted"


def _grouped_heads(target: Target, dtype: str, device: str) -> str | None:
    return _accepts(target, dtype, device, heads=2, value_dims=16)


def _unequal_value_dim(target: Target, dtype: str, device: str) -> str | None:
    return _accepts(target, dtype, device, heads=1, value_dims=32)


def _layout(target: Target, dtype: str, device: str) -> str | None:
    if "layout" in target.parameters:
        return None
    x = FORMATS[dtype].store(np.random.default_rng(7).standard_normal((1, 1, 2, 8)))
    for layout in ("half", "interleaved"):
        case = Case("rope", {"x": x, "positions": np.array([3, 11])}, {"layout": layout})
        seen = run(target, case.without_options("layout"), device=device)
        exact = np.stack([b.part("out").hi for b in enclose(case)]).reshape(x.shape)
        if seen.fault is None and np.allclose(seen.outputs["out"].astype(np.float64), exact, atol=_CLOSE):
            return layout
    return None


PROBES: Mapping[str, Mapping[str, Callable[[Target, str, str], str | None]]] = {
    "attention": {
        "causal_alignment": _alignment,
        "lse_base": _lse_base,
        "empty_row": _empty_row,
        "empty_row_lse": _empty_row_lse,
        "masked_nan": _masked_nan,
        "grouped_heads": _grouped_heads,
        "unequal_value_dim": _unequal_value_dim,
    },
    "rope": {"layout": _layout},
}


def probe(target: Target, dtype: str, *, device: str = "cpu") -> dict[str, str]:
    """All conventions of the target: the declared ones as they are, the others as probed on tiny cases of this dtype."""
    found = dict(target.conventions)
    for name, ask in PROBES.get(target.op, {}).items():
        if name not in found and (answer := ask(target, dtype, device)) is not None:
            found[name] = answer
    return found
