"""mla_backward as a case: the arrays and options of mla and ``do`` [B, H, Sq, d_v].

Outputs: dq_nope, dq_pe, dc_kv, dk_pe, dw_uk, dw_uv in the shapes of their inputs. Blocks, so that some rows of a large
case can be certified alone: (DQ, b, h) rows of one head's queries, (DC, b) keys of one sequence (sums over heads),
(DUK, h) and (DUV, h) rows of one head's weights (sums over sequences).

A gradient that reads a NaN or an infinity, in any of its head's rows, is undefined as a whole, but for dq, which is by
row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.base import Arithmetic, Value
from oracle.case import Case
from oracle.enclosure import Block, Rows
from oracle.formats import Float64Array
from oracle.ops import mla_backward, mla_case
from oracle.ops.attention_backward_case import pick_rows
from oracle.ops.mla_backward import HeadGradients
from oracle.ops.table import Op

DQ, DC, DUK, DUV = range(4)
OUTPUTS = tuple(f"d{name}" for name in mla_case.INPUTS)
HELD = {DQ: ("dq_nope", "dq_pe"), DC: ("dc_kv", "dk_pe"), DUK: ("dw_uk",), DUV: ("dw_uv",)}


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    mla_case.check(case)
    q, w_uv, do = (case.arrays[n] for n in ("q_nope", "w_uv", "do"))
    expected = (*q.shape[:3], w_uv.shape[1])
    if do.shape != expected:
        raise ValueError(f"do must be [B, H, Sq, d_v] = {list(expected)}, got shape {list(do.shape)}")


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    batch, heads = case.arrays["q_nope"].shape[:2]
    found: list[tuple[int, ...]] = [(DQ, b, h) for b in range(batch) for h in range(heads)]
    found += [(DC, b) for b in range(batch)]
    return found + [(kind, h) for kind in (DUK, DUV) for h in range(heads)]


def row_count(case: Case, key: tuple[int, ...]) -> int:
    a = case.arrays
    sizes = (a["q_nope"].shape[2], a["c_kv"].shape[1], a["w_uk"].shape[1], a["w_uv"].shape[1])
    return int(sizes[key[0]])


def heads_of(case: Case, key: tuple[int, ...]) -> list[tuple[int, int]]:
    """The heads (b, h) that a block sums over."""
    batch, heads = case.arrays["q_nope"].shape[:2]
    match key[0]:
        case 0:
            return [(key[1], key[2])]
        case 1:
            return [(key[1], h) for h in range(heads)]
        case _:
            return [(b, key[1]) for b in range(batch)]


def all_rows(case: Case) -> Rows:
    return np.arange(case.arrays["q_nope"].shape[2], dtype=np.int64)


def cotangent(case: Case, key: tuple[int, ...], rows: Rows) -> tuple[Float64Array, NDArray[np.bool_]]:
    """(dO [r, d_v] of one head with non-finite entries as 0, rows that have some)."""
    do = case.arrays["do"][key][rows].astype(np.float64)
    good = np.isfinite(do)
    return np.where(good, do, 0.0), ~good.all(axis=1)


def gradients(
    ar: Arithmetic, case: Case, key: tuple[int, int], rows: Rows
) -> tuple[HeadGradients, mla_case.Head, NDArray[np.bool_]]:
    """(gradients of head ``key`` from some of its rows, its numbers, undefined rows)."""
    x = mla_case.head(case, key, rows)
    do, spoiled = cotangent(case, key, rows)
    scale = mla_case.scale_value(ar, case)
    inputs = [ar.const(a) for a in (*x.arrays(), do)]
    made = mla_backward.head_gradients(ar, *inputs, scale=scale, visible=x.visible)
    return made, x, np.asarray(x.undefined | (spoiled & x.visible.any(axis=1)))


@dataclass(frozen=True, slots=True)
class Asked:
    """A case as the key of what is remembered about it."""

    digest: str
    case: Case = field(compare=False)


@lru_cache(maxsize=16)
def _remembered(asked: Asked, key: tuple[int, int]) -> tuple[HeadGradients, mla_case.Head, NDArray[np.bool_]]:
    ar = BallArithmetic()
    with ar.working():
        return gradients(ar, asked.case, key, all_rows(asked.case))


def of_all_rows(
    ar: Arithmetic, case: Case, key: tuple[int, int]
) -> tuple[HeadGradients, mla_case.Head, NDArray[np.bool_]]:
    """`gradients` of all rows of a head, which every block of it needs: in balls they are evaluated once."""
    if ar.name == "ball":
        return _remembered(Asked(case.digest(), case), key)
    return gradients(ar, case, key, all_rows(case))


def evaluate(ar: Arithmetic, case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    d_h = case.arrays["w_uk"].shape[1]
    width = d_h + case.arrays["q_pe"].shape[3]
    nothing = np.zeros(len(rows), dtype=bool)
    if key[0] == DQ:
        made, x, undefined = gradients(ar, case, (key[1], key[2]), rows)
        values = {"dq_nope": ar.columns(made.dq, 0, d_h), "dq_pe": ar.columns(made.dq, d_h, width)}
        empty = np.asarray(~x.visible.any(axis=1))
        return Block(key, rows, ar, values, empty, undefined, x.visible, at=key[1:], outputs=HELD[DQ])
    sums: dict[str, Value] = {}
    spoiled = False
    for head in heads_of(case, key):
        made, x, undefined = of_all_rows(ar, case, head)
        spoiled |= bool(undefined.any())
        dk_nope = ar.columns(made.dk, 0, d_h)
        w_uk, w_uv, c_kv = (ar.const(a) for a in (x.w_uk, x.w_uv, x.c_kv))
        match key[0]:
            case 1:
                parts = {
                    "dc_kv": mla_backward.latent_gradient(ar, dk_nope, made.dv, w_uk, w_uv),
                    "dk_pe": ar.columns(made.dk, d_h, width),
                }
            case 2:
                parts = {"dw_uk": mla_backward.weight_gradient(ar, dk_nope, c_kv)}
            case _:
                parts = {"dw_uv": mla_backward.weight_gradient(ar, made.dv, c_kv)}
        sums = {n: part if n not in sums else ar.add(sums[n], part) for n, part in parts.items()}
    values = {name: pick_rows(ar, value, rows) for name, value in sums.items()}
    undefined = np.full(len(rows), spoiled)
    return Block(key, rows, ar, values, nothing, undefined, at=key[1:], outputs=HELD[key[0]])


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    return {f"d{name}": case.arrays[name].shape for name in mla_case.INPUTS}


def _width(case: Case, key: tuple[int, ...]) -> int:
    a: dict[str, Any] = dict(case.arrays)
    return int(a["c_kv"].shape[1] if key[0] == DQ else a["q_nope"].shape[2] * a["q_nope"].shape[1])


OPS = (
    Op(
        name="mla_backward",
        inputs=(*mla_case.INPUTS, "do"),
        outputs=OUTPUTS,
        options=mla_case.OPTIONS,
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        output_shapes=output_shapes,
        model=None,
        width=_width,
        needed=lambda case: OUTPUTS,
    ),
)
