"""mla_backward as a case: the arrays and options of mla and ``do`` [B, H, Sq, d_v].

Outputs: dq_nope, dq_pe, dc_kv, dk_pe, dw_uk, dw_uv in the shapes of their inputs. Blocks, so that some rows of a large
case can be certified alone: (DQ, b, h) rows of one head's queries, (DC, b) keys of one sequence (sums over heads),
(DUK, h) and (DUV, h) rows of one head's weights (sums over sequences).

A gradient that reads a NaN or an infinity, in any of its head's rows, is undefined as a whole, but for dq, which is by
row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.attention import gradient_case as attention_backward_case
from oracle.ops.attention.gradient import PLAIN, Order
from oracle.ops.attention.gradient_case import pick_rows
from oracle.ops.attention.options import CHOICES
from oracle.ops.attention.row import scale_of
from oracle.ops.mla import case as mla_case
from oracle.ops.mla import formula as mla
from oracle.ops.mla import gradient as mla_backward
from oracle.ops.mla.gradient import HeadGradients, HeadInputs, Widths
from oracle.ops.op import Array, Gradient, Op

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


@dataclass(frozen=True, slots=True)
class Evaluated(Generic[V]):
    """One head on some of its rows: its gradients, its inputs as values and as numbers, undefined rows."""

    made: HeadGradients[V]
    values: HeadInputs[V]
    given: mla_case.Head
    undefined: NDArray[np.bool_]


def gradients(
    ar: Arithmetic[V],
    case: Case,
    key: tuple[int, int],
    rows: Rows,
    *,
    form: str = "materialised",
    order: Order = PLAIN,
) -> Evaluated[V]:
    x = mla_case.head(case, key, rows)
    do, spoiled = cotangent(case, key, rows)
    values = HeadInputs(*(ar.const(a) for a in (*x.arrays(), do)))
    scale = mla_case.scale_value(ar, case)
    made = mla_backward.head_gradients(ar, values, widths(case), scale=scale, visible=x.visible, form=form, order=order)
    return Evaluated(made, values, x, np.asarray(x.undefined | (spoiled & x.visible.any(axis=1))))


def widths(case: Case) -> Widths:
    (_, d_h, d_c), d_r = case.arrays["w_uk"].shape, case.arrays["q_pe"].shape[3]
    return Widths(d_h, d_r, d_c)


@dataclass(frozen=True, slots=True)
class Asked:
    """A case as the key of what is remembered about it."""

    digest: str
    case: Case = field(compare=False)


@lru_cache(maxsize=16)
def _remembered(asked: Asked, key: tuple[int, int]) -> Evaluated[Any]:
    ar = BallArithmetic()
    with ar.working():
        return gradients(ar, asked.case, key, all_rows(asked.case))


def of_all_rows(ar: Arithmetic[V], case: Case, key: tuple[int, int], **how: Any) -> Evaluated[V]:
    """`gradients` of all rows of a head, which every block of it needs: in balls they are evaluated once."""
    if ar.name == "ball":
        return _remembered(Asked(case.digest(), case), key)
    return gradients(ar, case, key, all_rows(case), **how)


def form_of(case: Case, rows: Rows) -> str:
    """The form in which to enclose dq of these rows: see `oracle.ops.mla.formula.form_for`."""
    w, keys, d_v = widths(case), case.arrays["c_kv"].shape[1], case.arrays["w_uv"].shape[1]
    return mla.form_for(len(rows), keys, head=w.head, rope=w.rope, value=d_v, latent=w.latent)


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows, **how: Any) -> Block:
    nothing = np.zeros(len(rows), dtype=bool)
    if key[0] == DQ:
        one = gradients(ar, case, (key[1], key[2]), rows, **(how or {"form": form_of(case, rows)}))
        values = {"dq_nope": one.made.dq_nope, "dq_pe": one.made.dq_pe}
        visible = one.given.visible
        empty = np.asarray(~visible.any(axis=1))
        return Block(key, rows, ar, values, empty, one.undefined, visible, at=key[1:], outputs=HELD[DQ])
    sums: dict[str, V] = {}
    spoiled = False
    for head in heads_of(case, key):
        one = of_all_rows(ar, case, head, **how)
        spoiled |= bool(one.undefined.any())
        parts = _shares(ar, key[0], one)
        sums = {n: part if n not in sums else ar.add(sums[n], part) for n, part in parts.items()}
    values = {name: pick_rows(ar, value, rows) for name, value in sums.items()}
    undefined = np.full(len(rows), spoiled)
    return Block(key, rows, ar, values, nothing, undefined, at=key[1:], outputs=HELD[key[0]])


def _shares(ar: Arithmetic[V], kind: int, one: Evaluated[V]) -> dict[str, V]:
    """What one head, or one sequence, adds to a block's sums."""
    match kind:
        case 1:
            return {"dc_kv": mla_backward.latent_gradient(ar, one.made, one.values), "dk_pe": one.made.dk_pe}
        case 2:
            return {"dw_uk": mla_backward.key_weight_gradient(ar, one.made, one.values)}
        case _:
            return {"dw_uv": mla_backward.value_weight_gradient(ar, one.made, one.values)}


def stages(contract: Contract, input_format: Format) -> dict[str, Format]:
    """Formats of the named stages: those of attention's gradients, and of what mla projects."""
    forward = mla_case.stages(contract, input_format)
    return {**attention_backward_case.stages(contract, input_format), **forward}


def modelled(contract: Contract, input_format: Format) -> Hashable:
    """What `model` reads of a contract."""
    order = (contract.latent.form, contract.gradient.delta, contract.weights.normalised)
    return (contract.arithmetic.compute, order, *stages(contract, input_format).items())


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """A block's gradients [r, c] as an honest kernel of this contract makes them: whole rows, no tiles, no splits."""
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    ar = RoundedArithmetic(compute, stages(contract, format_of(case.arrays["q_nope"])))
    stage = "latent" if contract.latent.form == "absorbed" else "output"
    order = Order(contract.gradient.delta, contract.weights.normalised, stage)
    with ar.working():
        block = evaluate(ar, case, key, rows, form=contract.latent.form, order=order)
        return {n: ar.to_enclosure(ar.round(value, "output"))[0] for n, value in block.values.items()}


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    return {f"d{name}": case.arrays[name].shape for name in mla_case.INPUTS}


def _width(case: Case, key: tuple[int, ...]) -> int:
    a: dict[str, Any] = dict(case.arrays)
    return int(a["c_kv"].shape[1] if key[0] == DQ else a["q_nope"].shape[2] * a["q_nope"].shape[1])


def sums_empty(case: Case, key: tuple[int, ...]) -> bool:
    """Whether a block sums over query rows that see no key."""
    return key[0] != DQ and not mla_case.visibility(case, all_rows(case)).any(axis=1).all()


OPS = (
    Op(
        name="mla_backward",
        family="attention",
        presets=presets.MLA_BACKWARD,
        arrays={**mla_case.ARRAYS, "do": Array("B H Sq d_v")},
        results={f"d{name}": array.dims for name, array in mla_case.ARRAYS.items()},
        options=mla_case.OPTIONS,
        conventions={"causal_alignment": CHOICES["causal_alignment"]},
        usual={"scale": scale_of("q_nope", "q_pe")},
        gradient=Gradient("mla", "do", {name: f"d{name}" for name in mla_case.INPUTS}, sums_empty=sums_empty),
        tiny=mla_case.TINY,
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        output_shapes=output_shapes,
        model=model,
        modelled=modelled,
        width=_width,
        needed=lambda case: OUTPUTS,
    ),
)
