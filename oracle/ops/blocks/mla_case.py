"""mla_block as a case: shapes, options, and the evaluation of one sequence, which is one block.

Arrays: x [B, S, E], positions int64 [S] or [B, S], w_dkv [d_c, E], w_uk [H, d_h, d_c], w_uv [H, d_v, d_c], w_kr
[d_r, E], w_dq [d_c', E], w_uq [H, d_h, d_c'], w_qr [H, d_r, d_c'], w_o [E', H d_v]. Options: base, layout, scaling
(None or a dict: `oracle.ops.rope.parameters`, without sections), scale (None: 1/sqrt(d_h + d_r), times yarn's
`softmax_factor`; a number stands for all of that), norm_kv [d_c] and norm_q [d_c'] (RMSNorm gains; None: no norm), eps,
num_heads (None, or H). Output: out [B, S, E']. Causal: row i reads rows 0 .. i.

A row is *undefined* where it reads a NaN or an infinity: in x up to its own row, in a weight or in a gain. The parts of
head h in a block are named as those of `oracle.ops.blocks.gqa_case`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.mp import mp_arithmetic
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, FloatArray, Format, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import formula as attention
from oracle.ops.blocks import mla as mla_block
from oracle.ops.blocks.gqa_case import PARTS
from oracle.ops.blocks.mla import Latents, Norm, Side, Weights
from oracle.ops.op import Array, Op, Tiny, check_dims
from oracle.ops.rope import formula as rope
from oracle.ops.rope.case import Rotation, length_of
from oracle.ops.rope.parameters import read_scaling
from oracle.ops.rope.scaling import softmax_factor

ARRAYS = {
    "x": Array("B S E"),
    "positions": Array("S", "positions"),
    "w_dkv": Array("d_c E", "weight"),
    "w_uk": Array("H d_h d_c", "weight"),
    "w_uv": Array("H d_v d_c", "weight"),
    "w_kr": Array("d_r E", "weight"),
    "w_dq": Array("d_cq E", "weight"),
    "w_uq": Array("H d_h d_cq", "weight"),
    "w_qr": Array("H d_r d_cq", "weight"),
    "w_o": Array("E' H*d_v", "weight"),
}
INPUTS = tuple(ARRAYS)
NORMS = ("norm_kv", "norm_q")
OPTIONS: dict[str, object] = {
    "base": 10000.0,
    "layout": "half",
    "scaling": None,
    "scale": None,
    "norm_kv": None,
    "norm_q": None,
    "eps": 1e-6,
    "num_heads": None,
}
TABLE_BITS = 160


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    # The others are named by products of axes, or in two ways.
    plain = [name for name in INPUTS if name not in ("positions", "w_o")]
    for name in plain:
        format_of(case.arrays[name])
    size = check_dims(ARRAYS, case, plain)
    w_o, positions = case.arrays["w_o"], case.arrays["positions"]
    if w_o.ndim != 2 or w_o.shape[1] != size["H"] * size["d_v"]:
        raise ValueError(f"w_o must be [E', H d_v] = [E', {size['H'] * size['d_v']}], got shape {list(w_o.shape)}")
    if positions.dtype != np.int64 or positions.shape not in ((size["S"],), (size["B"], size["S"])):
        raise ValueError(f"positions must be int64 [S] or [B, S], got {positions.dtype} {list(positions.shape)}")
    if size["d_r"] % 2:
        raise ValueError(f"d_r = {size['d_r']} is odd: pairs are rotated")
    _check_options(case, size)


def _check_options(case: Case, size: Mapping[str, int]) -> None:
    unknown = sorted(set(case.options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(OPTIONS)}")
    layout, base = chosen(case, "layout"), chosen(case, "base")
    if layout not in rope.LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(rope.LAYOUTS)}")
    for name, value in (("base", base), ("eps", chosen(case, "eps"))):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    for name, width in (("norm_kv", size["d_c"]), ("norm_q", size["d_cq"])):
        gain = case.options.get(name)
        if gain is not None and getattr(gain, "shape", None) != (width,):
            raise ValueError(f"{name} must be an array [{width}], got shape {list(np.shape(gain))}")
    heads = case.options.get("num_heads")
    if heads is not None and heads != size["H"]:
        raise ValueError(f"num_heads is {heads}, but w_uk has H = {size['H']}")
    if rotation(case).scaling.sections is not None:
        raise ValueError("scaling['mrope_section'] needs three positions a row, and mla_block has one")


def chosen(case: Case, name: str) -> Any:
    value = case.options.get(name)
    return OPTIONS[name] if value is None else value


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """What one sequence reads, float64 with everything non-finite set to zero; ``rows`` are those of the queries."""

    x: Float64Array
    positions: NDArray[np.int64]
    weights: Mapping[str, Float64Array]
    gains: Mapping[str, Float64Array | None]
    rows: Rows
    visible: NDArray[np.bool_]
    undefined: NDArray[np.bool_]


def sequence(case: Case, key: tuple[int, ...], rows: Rows) -> Sequence:
    given = case.arrays["positions"]
    x = case.arrays["x"][key[0]].astype(np.float64)
    weights = {n: case.arrays[n].astype(np.float64) for n in INPUTS if n not in ("x", "positions")}
    gains = {n: None if case.options.get(n) is None else case.options[n].astype(np.float64) for n in NORMS}
    undefined = np.logical_or.accumulate(~np.isfinite(x).all(axis=1))[rows]
    if not all(np.isfinite(a).all() for a in (*weights.values(), *gains.values()) if a is not None):
        undefined = np.ones(len(rows), dtype=bool)

    def clean(a: Float64Array) -> Float64Array:
        return np.where(np.isfinite(a), a, 0.0)

    return Sequence(
        clean(x),
        np.asarray(given if given.ndim == 1 else given[key[0]]),
        {n: clean(a) for n, a in weights.items()},
        {n: None if a is None else clean(a) for n, a in gains.items()},
        rows,
        np.arange(len(x))[None, :] <= np.asarray(rows)[:, None],
        np.asarray(undefined),
    )


def rotation(case: Case) -> Rotation:
    """What the options say of the rotation of all d_r entries."""
    dim, base = case.arrays["w_kr"].shape[0], float(chosen(case, "base"))
    scaling = read_scaling(case.options.get("scaling"), base=base, dim=dim, rotary_dim=dim)
    return Rotation(dim, dim, str(chosen(case, "layout")), base, scaling)


def scale_value(ar: Arithmetic[V], case: Case) -> V:
    scale = case.options.get("scale")
    if scale is not None:
        return ar.const(np.array([[scale]]))
    plain = attention.default_scale(ar, case.arrays["w_uk"].shape[1] + case.arrays["w_kr"].shape[0])
    factor = softmax_factor(ar, rotation(case).scaling)
    return plain if factor is None else ar.mul(plain, factor)


def scale_float(case: Case) -> float:
    """The scale to float64."""
    ar = mp_arithmetic(80)
    with ar.working():
        return float(scale_value(ar, case)[0, 0])


def sequence_length(case: Case, s: Sequence) -> int:
    """L' of one sequence, where the frequencies depend on it, else 0."""
    return length_of(rotation(case).scaling, case.arrays["positions"], s.positions)


def table_enclosure(case: Case, s: Sequence) -> tuple[Enclosure, Enclosure]:
    """cos and sin [S, d_r / 2] of the whole sequence."""
    return _table(s.positions.tobytes(), rotation(case), sequence_length(case, s))


@lru_cache(maxsize=8)
def _table(positions: bytes, how: Rotation, length: int) -> tuple[Enclosure, Enclosure]:
    ar = arb_arithmetic(TABLE_BITS)
    with ar.working():
        cos, sin = _turns(ar, np.frombuffer(positions, dtype=np.int64), how, length)
        return Enclosure(*ar.to_enclosure(cos)), Enclosure(*ar.to_enclosure(sin))


def sides(ar: Arithmetic[V], case: Case, s: Sequence) -> tuple[Side[V], Side[V]]:
    """The rows of the queries, and those of the keys."""
    how, length, place = rotation(case), sequence_length(case, s), np.asarray(s.rows)
    return (
        Side(ar.const(s.x[place]), *_turns(ar, s.positions[place], how, length), how.dim),
        Side(ar.const(s.x), *_turns(ar, s.positions, how, length), how.dim),
    )


def _turns(ar: Arithmetic[V], positions: NDArray[np.int64], how: Rotation, length: int) -> tuple[V, V]:
    return rope.table(ar, positions, how.base, how.rotary_dim, scaling=how.scaling, length=length)


def weights_of(ar: Arithmetic[V], case: Case, s: Sequence) -> Weights[V]:
    eps = ar.const(np.array([[float(chosen(case, "eps"))]]))
    norms = {n: None if g is None else Norm(ar.const(g[None]), eps, len(g)) for n, g in s.gains.items()}
    whole = {n: ar.const(s.weights[n]) for n in ("w_dkv", "w_kr", "w_dq", "w_o")}
    by_head = {n: [ar.const(w) for w in s.weights[n]] for n in ("w_uk", "w_uv", "w_uq", "w_qr")}
    return Weights(**whole, **by_head, **norms)  # type: ignore[arg-type]


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    s = sequence(case, key, rows)
    own, all_rows = sides(ar, case, s)
    weights, layout = weights_of(ar, case, s), str(chosen(case, "layout"))
    kept = mla_block.latents(ar, all_rows, weights, layout)
    parts, out = mla_block.from_latents(
        ar, own, kept, weights, scale=scale_value(ar, case), layout=layout, visible=s.visible
    )
    values: dict[str, V] = {"out": out}
    for h, part in enumerate(parts):
        values |= {f"{h}.{name}": getattr(part, name) for name in PARTS}
    nothing = np.zeros(len(rows), dtype=bool)
    return Block(key, rows, ar, values, nothing, s.undefined, s.visible)


def stages(contract: Contract, fmt: Format) -> dict[str, Format]:
    """Formats of the named stages; the cache's is one without a range, as scaled storage is."""

    def named(name: str) -> Format:
        return fmt if name == "input" else FORMATS[name]

    result = attention_case.stages(contract, fmt)
    result["block_output"] = result.pop("output")
    latent, rope = contract.latent, contract.rope
    stored = {"up": latent.up, "latent": latent.summed, "between": latent.between}
    for stage, name in {**stored, "rotate": rope.rotate, "table": rope.table, "angle": rope.angle}.items():
        if name is not None:
            result[stage] = named(name)
    if contract.latent.cache is not None:
        result["cache"] = replace(named(contract.latent.cache), emin=-126, emax=127, infinite=True)
    return result


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """``out`` [r, E'] of an honest kernel of this contract: sequential sums, whole rows of scores."""
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    # Inside the core an absorbed head puts out through `output` too, which is stored between the parts.
    named = stages(contract, format_of(case.arrays["x"]))
    ar = RoundedArithmetic(compute, {**named, "output": named.get("between", compute)})
    s = sequence(case, key, rows)
    with ar.working():
        own, all_rows = sides(ar, case, s)
        weights, layout = weights_of(ar, case, s), str(chosen(case, "layout"))
        kept: Latents[FloatArray] = mla_block.latents(ar, all_rows, weights, layout)
        _, out = mla_block.from_latents(
            ar,
            own,
            kept,
            weights,
            scale=scale_value(ar, case),
            layout=layout,
            visible=s.visible,
            form=contract.latent.form,
            normalise_first=contract.weights.normalised,
        )
        return {"out": ar.to_enclosure(out)[0]}


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    return [(b,) for b in range(case.arrays["x"].shape[0])]


OPS = (
    Op(
        name="mla_block",
        family="attention",
        presets=presets.MLA_BLOCK,
        arrays=ARRAYS,
        results={"out": "B S E'"},
        options=OPTIONS,
        tiny=Tiny(widths={"d_c": 2}, counts={"H": 2}, options={"num_heads": 2}),
        blocks=blocks,
        row_count=lambda case, key=(): int(case.arrays["x"].shape[1]),
        evaluate=evaluate,
        output_shapes=lambda case: {"out": (*case.arrays["x"].shape[:2], case.arrays["w_o"].shape[0])},
        model=model,
        width=lambda case, key: int(case.arrays["x"].shape[1]) * int(case.arrays["w_uk"].shape[0]),
    ),
)
