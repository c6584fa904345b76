"""gqa_block as a case: shapes, options, and the evaluation of one sequence, which is one block.

Arrays: x [B, S, E], w_q [H d, E], w_k and w_v [H_kv d, E], w_o [E', H d], cos and sin [S, d/2]. Options: num_heads H
and num_kv_heads H_kv, both required. Output: out [B, S, E']. Causal: row i reads rows 0 .. i of x and of the tables.

A row is *undefined* where it reads a NaN or an infinity: in x or in a table up to its own position, or in a weight.
The parts of head h in a block are named ``h.scores``, ``h.shift``, ``h.total``, ``h.lse`` and ``h.out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention.formula import Attended
from oracle.ops.blocks import gqa as gqa_block
from oracle.ops.blocks.gqa import Side, Weights
from oracle.ops.op import Array, Op, Tiny

ARRAYS = {
    "x": Array("B S E"),
    "w_q": Array("Hq*d E", "weight"),
    "w_k": Array("Hkv*d E", "weight"),
    "w_v": Array("Hkv*d E", "weight"),
    "w_o": Array("E' Hq*d", "weight"),
    "cos": Array("S d/2", "cos"),
    "sin": Array("S d/2", "sin"),
}
INPUTS = tuple(ARRAYS)
OPTIONS: dict[str, object] = {"num_heads": None, "num_kv_heads": None}
PARTS = ("scores", "shift", "total", "lse", "out")


@dataclass(frozen=True, slots=True)
class Sizes:
    """H, H_kv, d of a case."""

    heads: int
    kv_heads: int
    dim: int


def sizes(case: Case) -> Sizes:
    """ValueError, naming the option, unless both numbers of heads are there and divide what they must."""
    found = []
    for name in OPTIONS:
        value = case.options.get(name)
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        found.append(int(value))
    heads, kv_heads = found
    if heads % kv_heads:
        raise ValueError(f"num_heads = {heads} is no multiple of num_kv_heads = {kv_heads}")
    width = case.arrays["w_q"].shape[0]
    if width % heads:
        raise ValueError(f"w_q has {width} rows, which is no multiple of num_heads = {heads}")
    return Sizes(heads, kv_heads, width // heads)


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    a = case.arrays
    for name, array in ARRAYS.items():
        if a[name].ndim != len(array.axes):
            raise ValueError(f"{name} must have {len(array.axes)} dimensions, got shape {list(a[name].shape)}")
        format_of(a[name])
    unknown = sorted(set(case.options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(OPTIONS)}")
    s = sizes(case)
    if s.dim % 2:
        raise ValueError(f"the head dimension {s.dim} is odd: pairs are rotated")
    length, width = a["x"].shape[1:]
    expected = {
        "w_q": (s.heads * s.dim, width),
        "w_k": (s.kv_heads * s.dim, width),
        "w_v": (s.kv_heads * s.dim, width),
        "w_o": (a["w_o"].shape[0], s.heads * s.dim),
        "cos": (length, s.dim // 2),
        "sin": (length, s.dim // 2),
    }
    for name, shape in expected.items():
        if a[name].shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(a[name].shape)}")


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """What one sequence reads, float64 with everything non-finite set to zero; ``rows`` are those of the queries."""

    x: Float64Array
    cos: Float64Array
    sin: Float64Array
    weights: Mapping[str, Float64Array]
    rows: Rows
    visible: NDArray[np.bool_]
    undefined: NDArray[np.bool_]


def sequence(case: Case, key: tuple[int, ...], rows: Rows) -> Sequence:
    taken = {n: case.arrays[n].astype(np.float64) for n in INPUTS if n != "x"}
    taken["x"] = case.arrays["x"][key[0]].astype(np.float64)
    finite = {n: np.isfinite(a) for n, a in taken.items()}
    spoiled = ~(finite["x"].all(axis=1) & finite["cos"].all(axis=1) & finite["sin"].all(axis=1))
    undefined = np.logical_or.accumulate(spoiled)[rows]
    if not all(finite[n].all() for n in ("w_q", "w_k", "w_v", "w_o")):
        undefined = np.ones(len(rows), dtype=bool)
    clean = {n: np.where(finite[n], a, 0.0) for n, a in taken.items()}
    visible = np.arange(len(taken["x"]))[None, :] <= np.asarray(rows)[:, None]
    weights = {n: clean[n] for n in ("w_q", "w_k", "w_v", "w_o")}
    return Sequence(clean["x"], clean["cos"], clean["sin"], weights, rows, visible, np.asarray(undefined))


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    s = sequence(case, key, rows)
    parts, out = _block(ar, case, s)
    values: dict[str, V] = {"out": out}
    for h, part in enumerate(parts):
        values |= {f"{h}.{name}": getattr(part, name) for name in PARTS}
    nothing = np.zeros(len(rows), dtype=bool)
    return Block(key, rows, ar, values, nothing, s.undefined, s.visible)


def head_block(block: Block, head: int) -> Block:
    """The block of one head's attention inside a block of the whole."""
    own = f"{head}."

    def of_head(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(own): part for name, part in parts.items() if name.startswith(own)}

    return replace(block, values=of_head(block.values), patches=of_head(block.patches))


def _block(ar: Arithmetic[V], case: Case, s: Sequence, *, normalise_first: bool = False) -> tuple[list[Attended[V]], V]:
    n = sizes(case)
    x, cos, sin = (ar.const(a) for a in (s.x, s.cos, s.sin))
    place = np.asarray(s.rows)
    queries = Side(*(ar.const(a[place]) for a in (s.x, s.cos, s.sin)))
    weights = Weights(*(ar.const(s.weights[name]) for name in ("w_q", "w_k", "w_v", "w_o")))
    return gqa_block.gqa_block(
        ar,
        queries,
        Side(x, cos, sin),
        weights,
        heads=n.heads,
        kv_heads=n.kv_heads,
        dim=n.dim,
        visible=s.visible,
        normalise_first=normalise_first,
    )


def stages(contract: Contract, fmt: Format) -> dict[str, Format]:
    """Formats of the named stages: attention's, the stored projections', the rotation's, the heads' outputs."""
    result, between = attention_case.stages(contract, fmt), contract.latent.between
    for stage, name in (("up", between), ("heads", between), ("rotate", contract.rope.rotate)):
        if name is not None:
            result[stage] = fmt if name == "input" else FORMATS[name]
    return result


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """``out`` [r, E'] of an honest kernel of this contract: sequential sums, whole rows of scores."""
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    ar = RoundedArithmetic(compute, stages(contract, format_of(case.arrays["x"])))
    with ar.working():
        _, out = _block(ar, case, sequence(case, key, rows), normalise_first=contract.weights.normalised)
        return {"out": ar.to_enclosure(out)[0]}


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    return [(b,) for b in range(case.arrays["x"].shape[0])]


OPS = (
    Op(
        name="gqa_block",
        family="attention",
        presets=presets.GQA_BLOCK,
        arrays=ARRAYS,
        results={"out": "B S E'"},
        options=OPTIONS,
        tiny=Tiny(counts={"Hq": 2, "Hkv": 1}, options={"num_heads": 2, "num_kv_heads": 1}),
        blocks=blocks,
        row_count=lambda case, key=(): int(case.arrays["x"].shape[1]),
        evaluate=evaluate,
        output_shapes=lambda case: {"out": (*case.arrays["x"].shape[:2], case.arrays["w_o"].shape[0])},
        model=model,
        width=lambda case, key: int(case.arrays["x"].shape[1]) * int(case.options["num_heads"]),
    ),
)
