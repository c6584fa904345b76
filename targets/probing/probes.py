"""Tiny calls that find out what a target does where implementations legitimately differ.

A probe asks only which of the published conventions an output follows; it never fails a target, and what no probe can
tell stays unknown. A refusal (an exception on grouped heads, or on Dv != D) is a stated limit. Alignment is asked with
Sq = 2, Sk = 3; the LSE's base with one key; the value of an empty row with a mask, or else with more queries than keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from targets.calling.signature import OUTPUTS
from targets.calling.target import Observed, Target, run
from targets.probing.option_probes import OPTION_PROBES, alignment, empty_by_window

# A kernel that knows few head dimensions knows one of these.
WIDTHS = (16, 64, 128)
_CLOSE = 0.05


def tiny_case(
    op: str,
    dtype: str,
    *,
    width: int = 16,
    heads: int = 1,
    kv_heads: int = 1,
    queries: int = 2,
    keys: int = 3,
    value_dims: int | None = None,
    **options: Any,
) -> Case:
    """An ordinary case of an op as small as can be: normal numbers, scaled so that scores and outputs are near 1."""
    fmt, rng = FORMATS[dtype], np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]]
    match op:
        case "attention":
            shapes = {
                "q": (1, heads, queries, width),
                "k": (1, kv_heads, keys, width),
                "v": (1, kv_heads, keys, value_dims or width),
            }
        case "attention_backward":
            asked: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys}
            forward = tiny_case("attention", dtype, width=width, value_dims=value_dims, **asked, **options)
            do = fmt.store(rng.standard_normal((1, heads, queries, value_dims or width)))
            return Case(op, {**forward.arrays, "do": do}, options)
        case "attention_varlen":
            shapes = {
                "q": (queries, heads, width),
                "k": (keys, kv_heads, width),
                "v": (keys, kv_heads, value_dims or width),
            }
        case "attention_paged":
            # Two pages of which the second is used.
            shapes = {
                "q": (1, heads, queries, width),
                "k_cache": (2, 16, kv_heads, width),
                "v_cache": (2, 16, kv_heads, value_dims or width),
            }
        case "mla":
            shapes = {
                "q_nope": (1, heads, queries, width),
                "q_pe": (1, heads, queries, width // 2),
                "c_kv": (1, keys, 2 * width),
                "k_pe": (1, keys, width // 2),
                "w_uk": (heads, width, 2 * width),
                "w_uv": (heads, width, 2 * width),
            }
        case "rope_backward":
            shapes = {"dy": (1, heads, queries, width)}
        case "mla_backward":
            counts: dict[str, Any] = {"heads": heads, "queries": queries, "keys": keys}
            ahead = tiny_case("mla", dtype, width=width, **counts, **options)
            return Case(op, {**ahead.arrays, "do": fmt.store(rng.standard_normal((1, heads, queries, width)))}, options)
        case "mla_block":
            sizes = {"w_dkv": (2 * width, width), "w_uk": (2, width, 2 * width), "w_uv": (2, width, 2 * width)}
            sizes |= {"w_kr": (width, width), "w_dq": (width, width), "w_uq": (2, width, width)}
            sizes |= {"w_qr": (2, width, width), "w_o": (width, 2 * width), "x": (1, queries, width)}
            drawn = {n: rng.standard_normal(s) / (1 if n == "x" else np.sqrt(s[-1])) for n, s in sizes.items()}
            stored = {n: fmt.store(a) for n, a in drawn.items()}
            places = 3 + 8 * np.arange(queries, dtype=np.int64)
            return Case(op, {**stored, "positions": places}, {"num_heads": 2, **options})
        case "gqa_block":
            dims = {"x": (1, queries, width), "w_q": (2 * width, width), "w_k": (width, width), "w_v": (width, width)}
            dims["w_o"] = (width, 2 * width)
            made = {n: rng.standard_normal(s) / (1 if n == "x" else np.sqrt(s[-1])) for n, s in dims.items()}
            turns = 3 + 8 * np.arange(queries)[:, None] * 0.7 ** np.arange(width // 2)
            made |= {"cos": np.cos(turns), "sin": np.sin(turns)}
            return Case(op, {n: fmt.store(a) for n, a in made.items()}, {"num_heads": 2, "num_kv_heads": 1, **options})
        case "softmax_backward":
            y = tiny_case("softmax", dtype, width=width, queries=queries)
            weights = enclose(y)[0].part("out").hi
            return Case(op, {"y": fmt.store(weights), "dy": fmt.store(rng.standard_normal((queries, width)))}, options)
        case "rope" | "rope_apply":
            shapes = {"x": (1, heads, queries, width)}
        case _:
            shapes = {"x": (queries, width)}
    numbers = {n: rng.standard_normal(s) for n, s in shapes.items()}
    arrays: dict[str, Any] = {
        n: fmt.store(a / np.sqrt(2 * width) if n in ("w_uk", "w_uv") else a) for n, a in numbers.items()
    }
    if op == "attention_varlen":
        arrays |= {f"cu_seqlens_{n}": np.array([0, s], dtype=np.int32) for n, s in (("q", queries), ("k", keys))}
    if op == "attention_paged":
        arrays |= {"block_table": np.array([[1]], dtype=np.int32), "cache_seqlens": np.array([keys], dtype=np.int32)}
    positions = 3 + 8 * np.arange(queries, dtype=np.int64)
    if op in ("rope", "rope_backward"):
        arrays["positions"] = positions
    if op == "rope_apply":
        angle = positions[:, None] * 0.7 ** np.arange(width // 2)
        arrays |= {"cos": fmt.store(np.cos(angle)), "sin": fmt.store(np.sin(angle))}
    return Case(op, arrays, options)


@dataclass(frozen=True, slots=True)
class Asked:
    """A target at a dtype on a device, and a width that it takes."""

    target: Target
    dtype: str
    device: str
    width: int = 16

    def has(self, option: str) -> bool:
        return option in self.target.parameters

    def call(self, **shape_and_options: Any) -> tuple[Case, Observed]:
        """One call on a tiny case."""
        case = tiny_case(self.target.op, self.dtype, width=self.width, **shape_and_options)
        return case, run(self.target, case, device=self.device)


def asked_of(target: Target, dtype: str, *, device: str = "cpu") -> tuple[Asked, Observed]:
    """The first width at which an ordinary call is not refused, and what came of that call."""
    for width in WIDTHS:
        asked = Asked(target, dtype, device, width)
        seen = asked.call()[1]
        if seen.fault is None or not seen.fault[1].startswith("NotImplementedError"):
            break
    return asked, seen


def returns_lse_unasked(target: Target, dtype: str, *, device: str = "cpu") -> bool:
    """Whether the target has no ``return_lse`` and yet returns, after the output, something of the LSE's shape."""
    if "lse" not in OUTPUTS.get(target.op, ()) or "return_lse" in target.parameters:
        return False
    return "lse" in asked_of(target, dtype, device=device)[1].outputs


def probe(target: Target, dtype: str, *, device: str = "cpu") -> dict[str, str]:
    """All conventions of the target: the declared ones as they are, the others as probed."""
    found = dict(target.conventions)
    missing = [name for name in PROBES.get(target.op, {}) if name not in found]
    if missing:
        asked, seen = asked_of(target, dtype, device=device)
        # A target that does not even take an ordinary call tells nothing by refusing others.
        for name in missing if seen.fault is None else ():
            answer = PROBES[target.op][name](asked)
            if answer is not None:
                found[name] = answer
    return found


def contradictions(target: Target, dtype: str, *, device: str = "cpu") -> list[str]:
    """Declared conventions that a probe answers otherwise, each in one line."""
    probed = probe(replace(target, conventions={}), dtype, device=device)
    return [
        f"convention {name} is declared {stated}, but tiny calls show {probed[name]}"
        for name, stated in target.conventions.items()
        if name in probed and probed[name] != stated
    ]


def _float(array: NDArray[Any]) -> NDArray[np.float64]:
    return array.astype(np.float64)


def _exact(case: Case, shape: tuple[int, ...]) -> NDArray[np.float64]:
    name = _first_output(case)
    return np.stack([b.part(name).hi for b in enclose(case) if b.holds(name)]).reshape(shape)


def _first_output(case: Case) -> str:
    return OUTPUTS.get(case.op, ("out",))[0]


def _follows(seen: Observed, case: Case) -> bool:
    """Whether the output is the exact result of ``case``, as far as so short a look can tell."""
    if seen.fault is not None:
        return False
    out = _float(seen.outputs[_first_output(case)])
    return bool(out.size and np.allclose(out, _exact(case, out.shape), atol=_CLOSE, rtol=_CLOSE))


def _alignment(asked: Asked) -> str | None:
    if asked.target.op == "attention_paged":
        # Its queries are the last positions by definition.
        return "bottom_right"
    if not asked.has("is_causal"):
        return alignment(asked)
    for aligned in ("top_left", "bottom_right"):
        case, seen = asked.call(is_causal=True, causal_alignment=aligned)
        if _follows(seen, case):
            return aligned
    return None


def _lse_base(asked: Asked) -> str | None:
    if asked.target.op == "logsumexp":
        case, seen = asked.call()
        given, exact = seen.outputs.get("out"), enclose(case)[0].part("out").hi.reshape(-1)
    else:
        case, seen = asked.call(queries=1, keys=1, scale=1.0 if asked.has("scale") else None)
        given, exact = seen.outputs.get("lse"), enclose(case)[0].part("lse").hi.reshape(-1)
    if seen.fault is not None or given is None or given.size != exact.size:
        return None
    lse = _float(given).reshape(-1)
    for base, factor in (("e", 1.0), ("2", float(np.log(2.0)))):
        if np.allclose(lse * factor, exact, atol=0.0, rtol=_CLOSE):
            return base
    return None


def _without_keys(asked: Asked) -> tuple[Case, Observed, int] | None:
    """A call with an empty row: its case, what came of it, and which row is empty."""
    if asked.target.op in ("softmax", "logsumexp"):
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
    if asked.target.op == "attention":
        mean = _float(case.arrays["v"][0, 0]).mean(axis=0)
        return "mean" if row.shape == mean.shape and np.allclose(row, mean, atol=_CLOSE) else None
    if asked.target.op == "softmax":
        return "mean" if np.allclose(row, 1 / row.size, rtol=_CLOSE) else None
    return None


def _empty_row_lse(asked: Asked) -> str | None:
    called = _without_keys(asked)
    name = "out" if asked.target.op == "logsumexp" else "lse"
    if called is None or called[1].fault is not None or name not in called[1].outputs:
        return None
    value = float(_float(called[1].outputs[name]).reshape(-1)[called[2]])
    if np.isnan(value):
        return None
    return "finite" if np.isfinite(value) else ("+inf" if value > 0 else "-inf")


def _masked_nan(asked: Asked) -> str | None:
    if not asked.has("attn_mask"):
        return None
    mask = np.array([[[[True, True, False], [True, True, False]]]])
    case = tiny_case("attention", asked.dtype, width=asked.width, attn_mask=mask)
    spoiled = case.arrays["v"].copy()
    spoiled[0, 0, 2] = np.nan
    seen = run(asked.target, case.with_arrays(v=spoiled), device=asked.device)
    if seen.fault is not None:
        return None
    return "leaks" if np.isnan(_float(seen.outputs["out"])).any() else "blocked"


def _accepts(seen: Observed) -> str:
    return "refused" if seen.fault is not None and seen.fault[0] == "raised" else "accepted"


def _grouped_heads(asked: Asked) -> str | None:
    return _accepts(asked.call(heads=2)[1])


def _unequal_value_dim(asked: Asked) -> str | None:
    return _accepts(asked.call(value_dims=2 * asked.width)[1])


def _layout(asked: Asked) -> str | None:
    if asked.has("layout"):
        return None
    for layout in ("half", "interleaved"):
        case, seen = asked.call(layout=layout)
        if _follows(seen, case):
            return layout
    return None


_SCORES: Mapping[str, Callable[[Asked], str | None]] = {
    "causal_alignment": _alignment,
    "lse_base": _lse_base,
    "empty_row": _empty_row,
    "empty_row_lse": _empty_row_lse,
}
_LAYOUT = {
    **_SCORES,
    **OPTION_PROBES,
    "grouped_heads": _grouped_heads,
    "unequal_value_dim": _unequal_value_dim,
}
PROBES: Mapping[str, Mapping[str, Callable[[Asked], str | None]]] = {
    "attention": {
        **_SCORES,
        **OPTION_PROBES,
        "masked_nan": _masked_nan,
        "grouped_heads": _grouped_heads,
        "unequal_value_dim": _unequal_value_dim,
    },
    "attention_backward": {
        "causal_alignment": _alignment,
        "grouped_heads": _grouped_heads,
        "unequal_value_dim": _unequal_value_dim,
    },
    "attention_varlen": _LAYOUT,
    "attention_paged": _LAYOUT,
    "mla": _SCORES,
    "mla_backward": {"causal_alignment": _alignment},
    "rope": {"layout": _layout},
    "rope_backward": {"layout": _layout},
    "rope_apply": {"layout": _layout},
    "softmax": {"empty_row": _empty_row},
    "logsumexp": {"lse_base": _lse_base, "empty_row_lse": _empty_row_lse},
}
