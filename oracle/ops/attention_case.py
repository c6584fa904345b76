"""Attention as a case: shapes, visibility (causal, boolean mask), options, and the evaluation of one head.

Options (OPS): scale (None: 1/sqrt(D)), is_causal, attn_mask (bool, True = may attend; or additive float),
causal_alignment (``top_left`` or ``bottom_right``; matters only where Sq != Sk). Query head h reads KV head h // (Hq
/ Hkv).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, Value
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.bounds.contract import Contract
from oracle.case import Case
from oracle.enclosure import Block, Rows
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops import attention
from oracle.ops.table import Op

ALIGNMENTS = ("top_left", "bottom_right")
OPTIONS: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "attn_mask": None,
    "causal_alignment": "top_left",
}


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != 4:
            raise ValueError(f"{name} must be [B, H, S, D], got shape {list(a.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in head dimension: {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v differ in [B, H, S]: {list(k.shape[:3])} and {list(v.shape[:3])}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads")
    unknown = sorted(set(case.options) - set(OPTIONS) - {"return_lse"})
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(OPTIONS)}")
    alignment = case.options.get("causal_alignment", "top_left")
    if alignment not in ALIGNMENTS:
        raise ValueError(f"unknown causal_alignment {alignment!r}; known: {', '.join(ALIGNMENTS)}")
    mask = case.options.get("attn_mask")
    if mask is not None:
        np.broadcast_shapes(mask.shape, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))


def visibility(case: Case, key: tuple[int, ...], rows: Rows) -> NDArray[np.bool_]:
    """[r, Sk]: which keys each row may attend to (causal rule and boolean mask)."""
    sq, sk = case.arrays["q"].shape[2], case.arrays["k"].shape[2]
    visible = np.ones((len(rows), sk), dtype=bool)
    if case.options.get("is_causal"):
        shift = sk - sq if case.options.get("causal_alignment", "top_left") == "bottom_right" else 0
        visible &= np.arange(sk)[None, :] <= rows[:, None] + shift
    mask = case.options.get("attn_mask")
    if mask is not None and mask.dtype == np.bool_:
        visible &= _head_of(mask, case, key)[rows]
    elif mask is not None:
        visible &= ~np.isneginf(_head_of(mask, case, key)[rows].astype(np.float64))
    return visible


def _head_of(mask: NDArray[Any], case: Case, key: tuple[int, ...]) -> NDArray[Any]:
    q, k = case.arrays["q"], case.arrays["k"]
    return np.asarray(np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[key])


def head_inputs(
    case: Case, key: tuple[int, ...], rows: Rows
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """(q rows, k, v, additive bias rows or None) of one query head as float64, as stored (NaN and inf included)."""
    b, h = key
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    kv = h // (q.shape[1] // k.shape[1])
    mask = case.options.get("attn_mask")
    bias = None
    if mask is not None and mask.dtype != np.bool_:
        bias = _head_of(mask, case, key)[rows].astype(np.float64)
    taken = q[b, h] if len(rows) == q.shape[2] and np.array_equal(rows, np.arange(len(rows))) else q[b, h][rows]
    wide = [a.astype(np.float64, copy=False) for a in (taken, k[b, kv], v[b, kv])]
    return wide[0], wide[1], wide[2], bias


def scale_value(ar: Arithmetic, case: Case) -> Value:
    scale = case.options.get("scale")
    return attention.default_scale(ar, case.arrays["q"].shape[-1]) if scale is None else ar.const(np.array([[scale]]))


def scale_float(case: Case) -> float:
    """The scale as the nearest float64."""
    scale = case.options.get("scale")
    return float(scale) if scale is not None else 1.0 / float(np.sqrt(case.arrays["q"].shape[-1]))


def clean_head(
    case: Case, key: tuple[int, ...], rows: Rows
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[np.bool_], NDArray[np.bool_]]:
    """(q, k, v, bias, visible, undefined) with everything non-finite set to zero; rows that read some are
    `undefined`."""
    q, k, v, bias = head_inputs(case, key, rows)
    visible = visibility(case, key, rows)
    undefined = np.zeros(len(rows), dtype=bool)
    if not (_all_finite(q) and _all_finite(k) and _all_finite(v)):
        spoiled = ~np.isfinite(k).all(axis=1) | ~np.isfinite(v).all(axis=1)
        undefined |= ~np.isfinite(q).all(axis=1) & visible.any(axis=1)
        undefined |= (visible & spoiled[None, :]).any(axis=1)
        q, k, v = (np.where(np.isfinite(a), a, 0.0) for a in (q, k, v))
    if bias is not None:
        undefined |= (visible & ~np.isfinite(bias)).any(axis=1)
        bias = np.where(np.isfinite(bias) & visible, bias, 0.0)
    return q, k, v, bias, visible, undefined


def _all_finite(a: NDArray[Any]) -> bool:
    # One pass without a temporary decides nearly every case: a finite sum has finite terms.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(a.sum())) or bool(np.isfinite(a).all())


def evaluate(ar: Arithmetic, case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    q, k, v, bias, visible, undefined = clean_head(case, key, rows)
    done = attention.attention(
        ar,
        ar.const(q),
        ar.const(k),
        ar.const(v),
        scale=scale_value(ar, case),
        visible=visible,
        bias=None if bias is None else ar.const(bias),
    )
    values = {"scores": done.scores, "shift": done.shift, "total": done.total, "out": done.out, "lse": done.lse}
    return Block(key, rows, ar, values, np.asarray(~visible.any(axis=1)), undefined, visible)


def stages(contract: Contract, input_format: Format) -> dict[str, Format]:
    """The formats of the named stages that ``contract`` gives for inputs of this format."""

    def named(name: str | None) -> Format:
        return input_format if name is None or name == "input" else FORMATS[name]

    result = {"weights": named(contract.weights), "output": named(contract.output)}
    if contract.score_stores:
        result["raw_scores"] = result["scores"] = named(contract.scores)
    if contract.row_sum == "rounded":
        result["row_sum_terms"] = result["weights"]
    elif contract.row_sum != "unrounded":
        result["row_sum"] = named(contract.row_sum)
    if contract.accumulator is not None:
        result["accumulator"] = named(contract.accumulator)
    return result


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """O [r, Dv] and L [r, 1] of an honest kernel of this contract: sequential sums, tiles or splits if declared."""
    fmt = format_of(case.arrays["q"])
    compute = FORMATS["fp64" if contract.compute == "fp64" else "fp32"]
    ar = RoundedArithmetic(compute, stages(contract, fmt))
    q, k, v, bias, visible, _ = clean_head(case, key, rows)
    with ar.working():
        values = [ar.const(a) for a in (q, k, v)]
        scale = scale_value(ar, case)
        more = {"scale": scale, "visible": visible, "bias": None if bias is None else ar.const(bias)}
        if contract.splits > 1:
            out, lse = attention.attention_split(ar, *values, splits=contract.splits, **more)
        elif contract.tile is not None and not contract.normalised_p:
            out, lse = attention.attention_tiled(ar, *values, tile=contract.tile, **more)
        else:
            done = attention.attention(ar, *values, normalise_first=contract.normalised_p, **more)
            out, lse = done.out, done.lse
        return {"out": ar.to_enclosure(out)[0], "lse": ar.to_enclosure(lse)[0]}


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    b, h = case.arrays["q"].shape[:2]
    return [(i, j) for i in range(b) for j in range(h)]


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    b, h, sq = case.arrays["q"].shape[:3]
    return {"out": (b, h, sq, case.arrays["v"].shape[-1]), "lse": (b, h, sq)}


OPS = (
    Op(
        name="attention",
        inputs=("q", "k", "v"),
        outputs=("out", "lse"),
        options=OPTIONS,
        blocks=blocks,
        row_count=lambda case: int(case.arrays["q"].shape[2]),
        evaluate=evaluate,
        output_shapes=output_shapes,
        model=model,
    ),
)
