"""MLA as a case: shapes, causal visibility, options, and the evaluation of one head.

Options: scale (None: 1/sqrt(d_h + d_r)), is_causal, causal_alignment (``top_left`` or ``bottom_right``;
matters only where Sq != Sk). Arrays: q_nope [B, H, Sq, d_h], q_pe [B, H, Sq, d_r], c_kv [B, Sk, d_c], k_pe
[B, Sk, d_r] (one for all heads), w_uk [H, d_h, d_c], w_uv [H, d_v, d_c]. Outputs: out [B, H, Sq, d_v], lse
[B, H, Sq] (natural logarithm).

A row without visible keys is *empty*; a row that reads a NaN or an infinity (its own query, a visible key's
latent or k_pe, its head's weights) is *undefined*.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
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
from oracle.ops.attention import formula as attention
from oracle.ops.attention.options import Sizes, check_options, chosen, defaults
from oracle.ops.attention.row import SCORES, scale_of
from oracle.ops.mla import formula as mla
from oracle.ops.op import Array, Op, Tiny, check_dims

ARRAYS = {
    "q_nope": Array("B H Sq d_h"),
    "q_pe": Array("B H Sq d_r"),
    "c_kv": Array("B Sk d_c"),
    "k_pe": Array("B Sk d_r"),
    "w_uk": Array("H d_h d_c", "weight"),
    "w_uv": Array("H d_v d_c", "weight"),
}
INPUTS = tuple(ARRAYS)
TINY = Tiny(widths={"d_r": 0.5, "d_c": 2})
OPTIONS = defaults("scale", "is_causal", "causal_alignment")


def check(case: Case) -> None:
    """ValueError, naming the argument, unless shapes and options fit together."""
    check_dims(ARRAYS, case, INPUTS)
    check_options(case.options, OPTIONS, Sizes({}))


def visibility(case: Case, rows: Rows) -> NDArray[np.bool_]:
    """[r, Sk]: which keys each row may attend to."""
    sq, sk = case.arrays["q_nope"].shape[2], case.arrays["c_kv"].shape[1]
    if not case.options.get("is_causal"):
        return np.ones((len(rows), sk), dtype=bool)
    shift = sk - sq if chosen(case, "causal_alignment") == "bottom_right" else 0
    return np.asarray(np.arange(sk)[None, :] <= rows[:, None] + shift)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What one head reads, as float64 with everything non-finite set to zero, and which rows that spoils."""

    q_nope: Float64Array
    q_pe: Float64Array
    c_kv: Float64Array
    k_pe: Float64Array
    w_uk: Float64Array
    w_uv: Float64Array
    visible: NDArray[np.bool_]
    undefined: NDArray[np.bool_]

    def arrays(self) -> tuple[Float64Array, ...]:
        """In the order of the op's inputs."""
        return self.q_nope, self.q_pe, self.c_kv, self.k_pe, self.w_uk, self.w_uv


def head(case: Case, key: tuple[int, ...], rows: Rows) -> Head:
    """The inputs of head ``key`` = (batch, head) for ``rows``."""
    b, h = key
    a = case.arrays
    taken = (
        a["q_nope"][b, h][rows],
        a["q_pe"][b, h][rows],
        a["c_kv"][b],
        a["k_pe"][b],
        a["w_uk"][h],
        a["w_uv"][h],
    )
    wide = [np.asarray(x).astype(np.float64) for x in taken]
    visible = visibility(case, rows)
    undefined = np.zeros(len(rows), dtype=bool)
    finite = [np.isfinite(x) for x in wide]
    if not all(f.all() for f in finite):
        own = np.logical_and(finite[0].all(axis=1), finite[1].all(axis=1)) & finite[4].all() & finite[5].all()
        spoiled = ~np.logical_and(finite[2].all(axis=1), finite[3].all(axis=1))
        reads = np.where(own, (visible & spoiled).any(axis=1), visible.any(axis=1))
        undefined = np.asarray(reads, dtype=bool)
        wide = [np.where(f, x, 0.0) for f, x in zip(finite, wide, strict=True)]
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = wide
    return Head(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, visible, undefined)


def score_dims(case: Case) -> int:
    """d_h + d_r: the length of the dot product that a score is."""
    return int(case.arrays["q_nope"].shape[-1] + case.arrays["q_pe"].shape[-1])


def scale_value(ar: Arithmetic[V], case: Case) -> V:
    scale = case.options.get("scale")
    return attention.default_scale(ar, score_dims(case)) if scale is None else ar.const(np.array([[scale]]))


def scale_float(case: Case) -> float:
    """The scale as the nearest float64."""
    scale = case.options.get("scale")
    return float(scale) if scale is not None else 1.0 / float(np.sqrt(score_dims(case)))


def evaluate(ar: Arithmetic[V], case: Case, key: tuple[int, ...], rows: Rows) -> Block:
    """One head in the form that `oracle.ops.mla.formula.form_for` chooses."""
    inputs = head(case, key, rows)
    (d_h, d_c), d_v = inputs.w_uk.shape, inputs.w_uv.shape[0]
    # An empty row's values mean nothing, but its 0/0 would spoil a whole matrix of balls: let it see
    # everything.
    empty = np.logical_not(inputs.visible.any(axis=1))
    form = mla.form_for(len(rows), len(inputs.c_kv), head=d_h, rope=inputs.q_pe.shape[1], value=d_v, latent=d_c)
    done = mla.mla(
        ar,
        *(ar.const(x) for x in inputs.arrays()),
        scale=scale_value(ar, case),
        visible=np.logical_or(inputs.visible, empty[:, None]),
        form=form,
    )
    values = {
        "scores": done.scores,
        "shift": done.shift,
        "total": done.total,
        "out": done.out,
        "lse": done.lse,
    }
    return Block(key, rows, ar, values, empty, inputs.undefined, inputs.visible)


def stages(contract: Contract, input_format: Format) -> dict[str, Format]:
    """Formats of the named stages: attention's, the up-projected operands', the latent sum's."""
    result = attention_case.stages(contract, input_format)
    for stage, name in (("up", contract.latent.up), ("latent", contract.latent.summed)):
        if name is not None:
            result[stage] = input_format if name == "input" else FORMATS[name]
    return result


def modelled(contract: Contract, input_format: Format) -> Hashable:
    """What `model` reads of a contract."""
    order = (contract.latent.form, contract.sums.splits, contract.sums.tile, contract.weights.normalised)
    return (contract.arithmetic.compute, order, *stages(contract, input_format).items())


def model(case: Case, key: tuple[int, ...], rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    """out [r, d_v] and lse [r, 1] of an honest kernel of this contract: its form, its tiles or splits."""
    compute = FORMATS["fp64" if contract.arithmetic.compute == "fp64" else "fp32"]
    named = stages(contract, format_of(case.arrays["q_nope"]))
    ar = RoundedArithmetic(compute, named)
    absorbed = contract.latent.form == "absorbed"
    # The attention inside an absorbed kernel puts out latents: its output stage is the latent's.
    inner = RoundedArithmetic(compute, {**named, "output": named.get("latent", compute)}) if absorbed else ar
    inputs = head(case, key, rows)
    with ar.working():
        values = [ar.const(x) for x in inputs.arrays()]
        q, k, v = mla.operands(ar, *values, form=contract.latent.form)
        more: dict[str, Any] = {"scoring": attention.Scoring(scale_value(ar, case)), "visible": inputs.visible}
        if contract.sums.splits > 1:
            out, lse = attention.attention_split(inner, q, k, v, splits=contract.sums.splits, **more)
        elif contract.sums.tile is not None and not contract.weights.normalised:
            out, lse = attention.attention_tiled(inner, q, k, v, tile=contract.sums.tile, **more)
        else:
            done = attention.attention(inner, q, k, v, normalise_first=contract.weights.normalised, **more)
            out, lse = done.out, done.lse
        if absorbed:
            out = mla.project(ar, out, values[-1])
        return {"out": ar.to_enclosure(out)[0], "lse": ar.to_enclosure(lse)[0]}


def blocks(case: Case) -> list[tuple[int, ...]]:
    check(case)
    b, h = case.arrays["q_nope"].shape[:2]
    return [(i, j) for i in range(b) for j in range(h)]


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    b, h, sq = case.arrays["q_nope"].shape[:3]
    return {"out": (b, h, sq, case.arrays["w_uv"].shape[1]), "lse": (b, h, sq)}


OPS = (
    Op(
        name="mla",
        family="attention",
        presets=presets.MLA,
        arrays=ARRAYS,
        results={"out": "B H Sq d_v", "lse": "B H Sq"},
        options=OPTIONS,
        conventions=SCORES,
        usual={"scale": scale_of("q_nope", "q_pe")},
        tiny=TINY,
        blocks=blocks,
        row_count=lambda case, key=(): int(case.arrays["q_nope"].shape[2]),
        evaluate=evaluate,
        output_shapes=output_shapes,
        model=model,
        modelled=modelled,
        width=lambda case, key: int(case.arrays["c_kv"].shape[1]),
    ),
)
