"""Gradients of attention as a case: the arrays of attention and ``do`` [B, Hq, Sq, Dv], the options of attention.

Outputs: dq, dk, dv in the shapes of q, k, v; dbias in the shape of an additive attn_mask; dsinks [Hq] where there are
sinks. Each has blocks of its own, so that some rows of a large case can be certified alone: (DQ, b, h) rows of one
query head, (DKV, b, kv) keys of one KV head (sums over its group), (DBIAS, ...) rows of the mask, (DSINKS,) heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import Ball
from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Key, Rows, at_once, taken
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, StoredArray, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient as backward
from oracle.ops.attention.gradient import PLAIN, Order
from oracle.ops.attention.limits import LIMITS
from oracle.ops.attention.options import TABLE, chosen, defaults
from oracle.ops.attention.row import ARRAYS, CONVENTIONS, scale_of
from oracle.ops.op import REFUSAL, Array, Gradient, Op
from oracle.recent import Recent

DQ, DKV, DBIAS, DSINKS = range(4)
RESULTS = {"dq": "B Hq Sq D", "dk": "B Hkv Sk D", "dv": "B Hkv Sk Dv", "dbias": "...", "dsinks": "Hq"}
OUTPUTS = tuple(RESULTS)
OPTIONS = defaults(lacking="gradient")
HELD = {DQ: ("dq",), DKV: ("dk", "dv"), DBIAS: ("dbias",), DSINKS: ("dsinks",)}


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    attention_case.check(case)
    q, v, do = (case.arrays[n] for n in ("q", "v", "do"))
    expected = (*q.shape[:3], v.shape[-1])
    if do.shape != expected:
        raise ValueError(f"do must be [B, Hq, Sq, Dv] = {list(expected)}, got shape {list(do.shape)}")


def bias_of(case: Case) -> StoredArray | None:
    """The additive mask, which has a gradient; None for a boolean one."""
    mask = case.options.get("attn_mask")
    return None if mask is None or mask.dtype == np.bool_ else mask


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    batch, heads = case.arrays["q"].shape[:2]
    found: list[tuple[int, ...]] = [(DQ, b, h) for b in range(batch) for h in range(heads)]
    found += [(DKV, b, h) for b in range(batch) for h in range(case.arrays["k"].shape[1])]
    bias = bias_of(case)
    if bias is not None:
        found += [(DBIAS, *place) for place in np.ndindex(bias.shape[:-2])]
    if case.options.get("sinks") is not None:
        found.append((DSINKS,))
    return found


def row_count(case: Case, key: tuple[int, ...]) -> int:
    match key[0]:
        case 0:
            return int(case.arrays["q"].shape[2])
        case 1:
            return int(case.arrays["k"].shape[2])
        case 2:
            bias = bias_of(case)
            return 1 if bias is None or bias.ndim < 2 else int(bias.shape[-2])
        case _:
            return int(case.arrays["q"].shape[1])


def width(case: Case, key: tuple[int, ...]) -> int:
    return int(case.arrays["k" if key[0] == DQ else "q"].shape[2])


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    shapes = {f"d{n}": case.arrays[n].shape for n in "qkv"}
    bias = bias_of(case)
    if bias is not None:
        shapes["dbias"] = bias.shape
    if case.options.get("sinks") is not None:
        shapes["dsinks"] = case.options["sinks"].shape
    return shapes


def group(case: Case) -> int:
    """Query heads of one KV head."""
    return int(case.arrays["q"].shape[1] // case.arrays["k"].shape[1])


def cotangent(case: Case, key: Key, rows: Rows) -> tuple[Float64Array, NDArray[np.bool_]]:
    """(dO [r, Dv] of query head (b, h) with non-finite entries as 0, rows that have some)."""
    do = case.arrays["do"][key][..., rows, :].astype(np.float64)
    good = np.isfinite(do)
    return np.where(good, do, 0.0), np.asarray(~good.all(axis=-1))


Gradients = tuple[backward.Inner[V], attention_case.Head, V, NDArray[np.bool_]]
# Scores of so many pairs; a pair has about ten float64 numbers.
_LAST = Recent(2**21)


def head_gradients(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, *, order: Order = PLAIN) -> Gradients[V]:
    """(inner parts of query head ``key`` = (b, h), its numbers, dO as a value, undefined rows); or those of a stack.

    Small heads are evaluated with their neighbours, of which other blocks will ask.
    """
    stack, place = neighbours(case, key, rows) if ar.stacks else (key, None)
    what = (repr(ar), *(np.asarray(i).tobytes() for i in stack), rows.tobytes(), order)
    size = len(rows) * case.arrays["k"].shape[2] * np.size(stack[0])
    made: Gradients[V] = _LAST.of(case, what, size, lambda: _head_gradients(ar, case, stack, rows, order))
    if place is not None:
        made = picked(made, place)
    return made


def neighbours(case: Case, key: Key, rows: Rows) -> tuple[Key, Any]:
    """(the stack with which a head, or a smaller stack, is evaluated, its place there); None: it is one by itself."""
    batch, heads = case.arrays["q"].shape[:2]
    place = np.asarray(key[0] * heads + key[1])
    many = 1 if _mixed(case) else at_once(len(rows) * case.arrays["k"].shape[2])
    first = int(place.min()) // many * many
    count = min(many, batch * heads - first)
    if count <= max(1, place.size if place.ndim else 1) or int(place.max()) >= first + count:
        return key, None
    return tuple(np.divmod(np.arange(first, first + count), heads)), place - first


def _mixed(case: Case) -> bool:
    """Whether some heads have a sink and some have none."""
    sinks = case.options.get("sinks")
    return sinks is not None and len(set(np.isneginf(sinks).tolist())) > 1


def picked(made: Any, place: Any) -> Any:
    """One head (an index), or those of a stack, of what a stack gives: tuples, dataclasses, arrays, values."""
    if isinstance(made, tuple):
        return tuple(picked(part, place) for part in made)
    if is_dataclass(made) and not isinstance(made, type | Ball):
        parts = {field.name: getattr(made, field.name) for field in fields(made)}
        return replace(made, **{name: picked(part, place) for name, part in parts.items() if part is not None})
    return taken(made, place)


def _head_gradients(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, order: Order) -> Gradients[V]:
    x = attention_case.head(case, key, rows)
    do, spoiled = cotangent(case, key, rows)
    value = ar.const(do)
    made = backward.inner(
        ar,
        ar.const(x.q),
        ar.const(x.k),
        ar.const(x.v),
        value,
        scoring=attention_case.scoring(ar, case, x),
        visible=x.visible,
        sink=attention_case.sink_value(ar, x),
        order=order,
    )
    return made, x, value, x.undefined | (spoiled & x.visible.any(axis=-1))


def kind_of(key: Key) -> int:
    """Of a block or a stack."""
    return int(np.ravel(key[0])[0])


def together(case: Case, key: tuple[int, ...]) -> Hashable:
    """Query heads among themselves, and KV heads."""
    return key[0] if key[0] in (DQ, DKV) and not _mixed(case) else key


def evaluate(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, *, order: Order = PLAIN) -> Block:
    made = (_queries, _keys, _bias, _sinks)[kind_of(key)]
    return made(ar, case, key, rows, order)


def stages(contract: Contract, input_format: Format) -> dict[str, Format]:
    """Formats of the named stages: those of attention, and of P where its stored form is used again, dP and dS."""
    found = attention_case.stages(contract, input_format)
    if contract.scores.stores:
        found["probabilities"] = found["weights"]
    if contract.gradient.dp_stored:
        found["dp"] = input_format
    if contract.gradient.stores:
        found["ds"] = input_format
    return found


def order_of(contract: Contract) -> Order:
    return Order(contract.gradient.delta, contract.weights.normalised)


def modelled(contract: Contract, input_format: Format) -> Hashable:
    """What `model` reads of a contract."""
    return (contract.arithmetic.compute, order_of(contract), *stages(contract, input_format).items())


def model(case: Case, key: Key, rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """A block's gradients [r, c] as an honest kernel of this contract makes them: whole rows, no tiles, no splits."""
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    ar = RoundedArithmetic(compute, stages(contract, format_of(case.arrays["q"])))
    with ar.working():
        block = evaluate(ar, case, key, rows, order=order_of(contract))
        return {n: ar.to_enclosure(ar.round(value, "output"))[0] for n, value in block.values.items()}


def _queries(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, order: Order) -> Block:
    made, x, _, undefined = head_gradients(ar, case, key[1:], rows, order=order)
    scale = attention_case.scale_value(ar, case)
    values = {"dq": backward.dq(ar, made, ar.const(x.k), scale)}
    empty = np.asarray(~x.visible.any(axis=-1))
    return Block(key, rows, ar, values, empty, undefined, x.visible, at=key[1:], outputs=HELD[DQ])


def heads_of(case: Case, key: Key) -> Iterator[tuple[Any, Any]]:
    """The query heads (b, h) that a block sums over; of a stack, one stack of them after another."""
    batch, heads = case.arrays["q"].shape[:2]
    match kind_of(key):
        case 0:
            yield key[1], key[2]
        case 1:
            size = group(case)
            yield from ((key[1], key[2] * size + i) for i in range(size))
        case 2:
            yield from ((b, h) for b in range(batch) for h in range(heads) if _is_part(case, key[1:], (b, h)))
        case _:
            yield from ((b, h) for b in range(batch) for h in range(heads))


def _is_part(case: Case, place: tuple[int, ...], head: tuple[int, int]) -> bool:
    bias = bias_of(case)
    assert bias is not None
    sizes = bias.shape[:-2]
    own = head[2 - len(sizes) :]
    return all(size == 1 or at == h for size, at, h in zip(sizes, place, own, strict=True))


def _all_rows(case: Case) -> Rows:
    return np.arange(case.arrays["q"].shape[2], dtype=np.int64)


def _keys(ar: Arithmetic[V], case: Case, key: Key, rows: Rows, order: Order) -> Block:
    scale = attention_case.scale_value(ar, case)
    of_k, of_v = [], []
    spoiled = np.zeros(np.shape(key[1]), dtype=bool)
    for head in heads_of(case, key):
        made, x, do, undefined = head_gradients(ar, case, head, _all_rows(case), order=order)
        spoiled = spoiled | undefined.any(axis=-1)
        of_k.append(backward.dk(ar, made, ar.const(x.q), scale))
        of_v.append(backward.dv(ar, made, do))
    values = {name: pick_rows(ar, reduce(ar.add, shares), rows) for name, shares in (("dk", of_k), ("dv", of_v))}
    # A row that has no value gives none to any key.
    undefined = np.repeat(spoiled[..., None], len(rows), axis=-1)
    return Block(key, rows, ar, values, np.zeros_like(undefined), undefined, at=key[1:], outputs=HELD[DKV])


def pick_rows(ar: Arithmetic[V], value: V, rows: Rows) -> V:
    """Rows of a value by number."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return ar.rows(value, int(rows[0]), int(rows[0]) + len(rows))
    turned = ar.transpose(value)
    return ar.transpose(ar.hstack([ar.columns(turned, int(i), int(i) + 1) for i in rows]))


def _bias(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows, order: Order) -> Block:
    bias = bias_of(case)
    assert bias is not None
    last = chosen(case, "softcap_order") == "after_mask"
    parts, spoiled = [], np.zeros(case.arrays["q"].shape[2], dtype=bool)
    for head in heads_of(case, key):
        made, _, _, undefined = head_gradients(ar, case, head, _all_rows(case), order=order)
        parts.append(made.dx if last else made.ds)
        spoiled |= undefined
    whole = reduce(ar.add, parts)
    if bias.ndim < 2 or bias.shape[-2] == 1:
        whole, spoiled = _summed(ar, whole), np.array([spoiled.any()])
    if bias.shape[-1] == 1:
        whole = ar.row_sum(whole, "delta")
    nothing = np.zeros(len(rows), dtype=bool)
    value = pick_rows(ar, whole, rows)
    return Block(key, rows, ar, {"dbias": value}, nothing, spoiled[rows], at=key[1:], outputs=HELD[DBIAS])


def _summed(ar: Arithmetic[V], value: V) -> V:
    """The sum of all rows, as one row."""
    return ar.transpose(ar.row_sum(ar.transpose(value), "delta"))


def _sinks(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows, order: Order) -> Block:
    parts, spoiled = [], []
    for h in rows.tolist():
        whole: V = ar.const(np.zeros((1, 1)))
        bad = False
        for b in range(case.arrays["q"].shape[0]):
            made, _, _, undefined = head_gradients(ar, case, (b, h), _all_rows(case), order=order)
            bad |= bool(undefined.any())
            if made.sink_weight is not None:
                whole = ar.add(whole, backward.dsink(ar, made))
        parts.append(whole)
        spoiled.append(bad)
    values = {"dsinks": ar.transpose(ar.hstack(parts))}
    nothing = np.zeros(len(rows), dtype=bool)
    return Block(key, rows, ar, values, nothing, np.array(spoiled), at=(), outputs=HELD[DSINKS])


def needed(case: Case) -> tuple[str, ...]:
    """Every target gives these; only the gradient of an additive mask, which is often a constant, it may leave out."""
    return OUTPUTS[:3] if case.options.get("sinks") is None else (*OUTPUTS[:3], "dsinks")


def sums_empty(case: Case, key: tuple[int, ...]) -> bool:
    """Whether a block sums over query rows that see neither a key nor a sink."""
    if key[0] == DQ or case.options.get("sinks") is not None:
        return False
    heads = heads_of(case, key)
    return any(not attention_case.visibility(case, head, _all_rows(case)).any(axis=1).all() for head in heads)


OPS = (
    Op(
        name="attention_backward",
        family="attention",
        presets=presets.ATTENTION_BACKWARD,
        arrays={**ARRAYS, "do": Array("B Hq Sq Dv")},
        results=RESULTS,
        options=OPTIONS,
        conventions={**CONVENTIONS, **dict.fromkeys(LIMITS, REFUSAL)},
        limits=LIMITS,
        usual={"scale": scale_of("q")},
        gradient=Gradient(
            "attention",
            "do",
            {"q": "dq", "k": "dk", "v": "dv"},
            {row.name: row.gradient for row in TABLE if row.gradient},
            sums_empty,
        ),
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        together=together,
        output_shapes=output_shapes,
        model=model,
        modelled=modelled,
        width=width,
        needed=needed,
    ),
)
