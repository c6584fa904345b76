"""rope, rope_backward and rope_apply as cases: shapes, options, positions, and the evaluation of one head.

rope: x [B, H, S, D], positions int64 [S] or [B, S]; options base (10000.0), layout (``half`` or
``interleaved``), rotary_dim (None: D; even), scaling (None or a dict: `oracle.ops.rope.parameters`). With
sections, positions are [3, S] or [3, B, S]: time, height, width. rope_backward: dy in the place of x, rotated
back: the output is dx. rope_apply: x, and cos and sin [S, d/2] that are exact as
stored; option layout; rotary_dim is twice the tables' width. A block is one head, its rows are the positions in
the sequence; out [B, H, S, D]. Entries from rotary_dim on are copies of x.

A row that holds a NaN or an infinity, in x or in its row of a given table, is *undefined* as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.base import Arithmetic, V
from oracle.arithmetic.mp import mp_arithmetic
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, StoredArray, format_of
from oracle.ops.op import Array, Gradient, Op
from oracle.ops.rope import formula as rope
from oracle.ops.rope.parameters import read_scaling
from oracle.ops.rope.scaling import PLAIN, Scaling, axes, magnitude
from oracle.vacuity import exactly

ROPE_OPTIONS: dict[str, object] = {"base": 10000.0, "layout": "half", "rotary_dim": None, "scaling": None}
APPLY_OPTIONS: dict[str, object] = {"layout": "half"}
# Tables above this many entries are evaluated anew for each head rather than kept.
KEPT_ENTRIES = 2**21


@dataclass(frozen=True, slots=True)
class Rotation:
    """What the options of a case say: head dimension, rotary_dim, layout, base, scaling."""

    dim: int
    rotary_dim: int
    layout: str
    base: float
    scaling: Scaling = PLAIN


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    x = turned_array(case)
    if x.ndim != 4:
        raise ValueError(f"{turned_name(case)} must be [B, H, S, D], got shape {list(x.shape)}")
    format_of(x)
    known = APPLY_OPTIONS if case.op == "rope_apply" else ROPE_OPTIONS
    unknown = sorted(set(case.options) - set(known))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    layout = case.options.get("layout", "half")
    if layout not in rope.LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(rope.LAYOUTS)}")
    if case.op == "rope_apply":
        _check_tables(case.arrays["cos"], case.arrays["sin"], x.shape)
    else:
        _check_numbers(case)
        # Reads the parameters of the scaling, too.
        sections = rotation(case).scaling.sections
        _check_positions(case.arrays["positions"], x.shape, by_axis=sections is not None)


def output_name(case: Case) -> str:
    return "dx" if case.op == "rope_backward" else "out"


def turned_name(case: Case) -> str:
    """The name of the array that is rotated."""
    return "dy" if case.op == "rope_backward" else "x"


def turned_array(case: Case) -> StoredArray:
    """What is rotated: x [B, H, S, D], or dy."""
    return case.arrays[turned_name(case)]


def _check_positions(positions: StoredArray, shape: tuple[int, ...], *, by_axis: bool) -> None:
    if positions.dtype != np.int64:
        raise ValueError(f"positions must be int64, got {positions.dtype}")
    known = ((shape[2],), (shape[0], shape[2]))
    words = "[S] or [B, S]"
    if by_axis:
        known, words = ((3, shape[2]), (3, shape[0], shape[2])), "[3, S] or [3, B, S] with mrope_section,"  # type: ignore[assignment]
    if positions.shape not in known:
        raise ValueError(f"positions must be {words} for x {list(shape)}, got shape {list(positions.shape)}")


def _check_numbers(case: Case) -> None:
    base = float(case.options.get("base", 10000.0))
    if not (np.isfinite(base) and base > 0):
        raise ValueError(f"base must be a positive number, got {base}")
    dim, rotary_dim = turned_array(case).shape[3], case.options.get("rotary_dim")
    if rotary_dim is None and dim % 2:
        raise ValueError(f"rotary_dim defaults to D = {dim}, which is odd; state an even one")
    if rotary_dim is not None and not (0 < rotary_dim <= dim and rotary_dim % 2 == 0):
        raise ValueError(f"rotary_dim must be even and in 2 .. {dim}, got {rotary_dim}")


def _check_tables(cos: StoredArray, sin: StoredArray, shape: tuple[int, ...]) -> None:
    for name, a in (("cos", cos), ("sin", sin)):
        format_of(a)
        if a.ndim != 2 or a.shape[0] != shape[2] or not 0 < 2 * a.shape[1] <= shape[3]:
            raise ValueError(f"{name} must be [S, rotary_dim/2] for x {list(shape)}, got shape {list(a.shape)}")
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin differ in shape: {list(cos.shape)} and {list(sin.shape)}")


def rotation(case: Case) -> Rotation:
    dim = turned_array(case).shape[3]
    layout = case.options.get("layout", "half")
    if case.op == "rope_apply":
        return Rotation(dim, 2 * case.arrays["cos"].shape[1], layout, 1.0)
    rotary_dim, base = case.options.get("rotary_dim"), float(case.options.get("base", 10000.0))
    rotary_dim = dim if rotary_dim is None else rotary_dim
    scaling = read_scaling(case.options.get("scaling"), base=base, dim=dim, rotary_dim=rotary_dim)
    return Rotation(dim, rotary_dim, layout, base, scaling)


def head_positions(case: Case, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Positions of one head: [S], or [3, S] with sections."""
    positions = case.arrays["positions"]
    by_axis = rotation(case).scaling.sections is not None
    if positions.ndim == (3 if by_axis else 2):
        positions = positions[:, key[0]] if by_axis else positions[key[0]]
    return np.asarray(positions)


def positions_of(case: Case, key: tuple[int, ...], rows: Rows) -> NDArray[np.int64]:
    """Positions of the given rows of one head: [r], or [3, r] with sections."""
    return head_positions(case, key)[..., rows]


def sequence_length(case: Case, key: tuple[int, ...]) -> int:
    """L', where the frequencies of this head depend on it, else 0."""
    return length_of(rotation(case).scaling, case.arrays["positions"], head_positions(case, key))


def length_of(scaling: Scaling, whole: NDArray[np.int64], own: NDArray[np.int64]) -> int:
    """L' of a sequence at positions ``own`` in a call at ``whole``, where frequencies depend on it, else 0."""
    if not scaling.by_length:
        return 0
    if isinstance(scaling.seq_len, int):
        return scaling.seq_len
    at = whole if scaling.seq_len == "call" else own
    return int(at.max(initial=-1)) + 1


def pair_positions(case: Case, key: tuple[int, ...], rows: Rows) -> NDArray[np.int64]:
    """[r, 1]: what all pairs of a row turn by; with sections [r, d/2]."""
    how, positions = rotation(case), positions_of(case, key, rows)
    return positions[:, None] if positions.ndim == 1 else positions[axes(how.scaling, how.rotary_dim // 2)].T


def size_of(case: Case) -> float:
    """The magnitude that multiplies every rotated pair, to float64."""
    ar = mp_arithmetic(80)
    size = magnitude(ar, rotation(case).scaling)
    return 1.0 if size is None else float(size[0, 0])


def clean_head(case: Case, key: tuple[int, ...], rows: Rows) -> tuple[Float64Array, NDArray[np.bool_]]:
    """(x rows [r, D] as float64 with everything non-finite set to zero, undefined [r])."""
    x = turned_array(case)[key][rows].astype(np.float64)
    finite = np.isfinite(x)
    undefined = np.asarray(~finite.all(axis=1))
    if case.op == "rope_apply":
        for name in ("cos", "sin"):
            undefined |= ~np.isfinite(case.arrays[name][rows].astype(np.float64)).all(axis=1)
    return np.where(finite, x, 0.0), undefined


def given_table(case: Case, rows: Rows) -> tuple[Float64Array, Float64Array]:
    """cos and sin of rope_apply as float64, non-finite entries as zero."""
    wide = (case.arrays[name][rows].astype(np.float64) for name in ("cos", "sin"))
    cos, sin = (np.where(np.isfinite(a), a, 0.0) for a in wide)
    return cos, sin


def table(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> tuple[V, V]:
    """The table of one head's rows in ``ar``; heads with the same positions share one (see
    `KEPT_ENTRIES`)."""
    if case.op == "rope_apply":
        cos, sin = given_table(case, rows)
        return ar.round(ar.const(cos), "table"), ar.round(ar.const(sin), "table")
    how = rotation(case)
    positions, length = positions_of(case, key, rows), sequence_length(case, key)
    if positions.size * how.rotary_dim <= KEPT_ENTRIES and ar.name in ("ball", "arb"):
        return _kept_table(ar.name, getattr(ar, "precision", 0), positions.tobytes(), positions.ndim, how, length)
    return rope.table(ar, positions, how.base, how.rotary_dim, scaling=how.scaling, length=length)


@lru_cache(maxsize=4)
def _kept_table(name: str, precision: int, positions: bytes, ndim: int, how: Rotation, length: int) -> tuple[Any, Any]:
    # The arithmetic is made anew because instances of arb's do not compare equal; its values do not depend
    # on that.
    ar: Arithmetic[Any] = BallArithmetic() if name == "ball" else arb_arithmetic(precision)
    at = np.frombuffer(positions, dtype=np.int64)
    at = at if ndim == 1 else at.reshape(3, -1)
    with ar.working():
        return rope.table(ar, at, how.base, how.rotary_dim, scaling=how.scaling, length=length)


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    """cos, sin and out on ``rows``."""
    x, undefined = clean_head(case, key, rows)
    how = rotation(case)
    cos, sin = table(ar, case, key, rows)
    out = _rotated(ar, case, x, cos, sin, how)
    values = {"cos": cos, "sin": sin, output_name(case): out}
    return Block(key, rows, ar, values, np.zeros(len(rows), dtype=bool), undefined)


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """``out`` of an honest kernel of this contract, stage by stage."""
    fmt = format_of(turned_array(case))
    compute = _named(contract.arithmetic.compute, fmt)
    ar = RoundedArithmetic(compute, stages(contract, fmt))
    x, _ = clean_head(case, key, rows)
    how = rotation(case)
    with ar.working():
        cos, sin = table(ar, case, key, rows)
        return {output_name(case): ar.to_enclosure(_rotated(ar, case, x, cos, sin, how))[0]}


def _rotated(ar: Arithmetic[V], case: Case, x: Float64Array, cos: V, sin: V, how: Rotation) -> V:
    back = case.op == "rope_backward"
    return rope.rotate(ar, ar.const(x), cos, sin, dim=how.dim, rotary_dim=how.rotary_dim, layout=how.layout, back=back)


def stages(contract: Contract, fmt: Format) -> dict[str, Format]:
    """Stage name -> format for inputs of ``fmt``."""
    result, rope = {"output": _named(contract.output.stored_as, fmt)}, contract.rope
    for stage, name in (("angle", rope.angle), ("table", rope.table), ("rotate", rope.rotate)):
        if name is not None:
            result[stage] = _named(name, fmt)
    return result


def _named(name: str | None, fmt: Format) -> Format:
    return fmt if name is None or name == "input" else FORMATS[name]


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    b, h = turned_array(case).shape[:2]
    return [(i, j) for i in range(b) for j in range(h)]


def unrotated(case: Case, block: Block) -> Mapping[str, Enclosure]:
    """What comes in, as the output of a rotation that does not happen."""
    return {"the unrotated input": exactly(turned_array(case)[block.key][block.rows])}


def _op(name: str, arrays: Mapping[str, Array], *, output: str = "out", **more: Any) -> Op:
    """A rotation by angle zero may hand its input back."""
    return Op(
        name=name,
        family="rope",
        presets=presets.ROPE,
        arrays=arrays,
        results={output: "B H S D"},
        conventions={"layout": rope.LAYOUTS},
        passed=("layout",),
        may_alias=True,
        trivial=unrotated,
        blocks=blocks,
        row_count=lambda case, key=(): int(turned_array(case).shape[2]),
        evaluate=evaluate,
        output_shapes=lambda case: {output: turned_array(case).shape},
        model=model,
        width=lambda case, key: int(turned_array(case).shape[-1]),
        **more,
    )


_X, _POSITIONS = Array("B H S D"), Array("S", "positions")
_TURNED: dict[str, Any] = {
    "options": ROPE_OPTIONS,
    "usual": {"rotary_dim": lambda case: turned_array(case).shape[-1]},
}
OPS = (
    _op("rope", {"x": _X, "positions": _POSITIONS}, **_TURNED),
    _op(
        "rope_backward",
        {"dy": _X, "positions": _POSITIONS},
        output="dx",
        gradient=Gradient("rope", "dy", {"x": "dx"}),
        **_TURNED,
    ),
    _op(
        "rope_apply",
        {"x": _X, "cos": Array("S D/2", "cos"), "sin": Array("S D/2", "sin")},
        options=APPLY_OPTIONS,
    ),
)
