"""Whole blocks, gqa_block and mla_block, evaluated with one step changed that no inputs can change.

The formulas are the oracle's own; `ChangedStep` says what they are given instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import Ball, BallArithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.formats import Float64Array
from oracle.ops.attention.formula import Attended
from oracle.ops.blocks import gqa as gqa_block
from oracle.ops.blocks import gqa_case as gqa_block_case
from oracle.ops.blocks import mla as mla_block
from oracle.ops.blocks import mla_case as mla_block_case
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Key

Bools = NDArray[np.bool_]
Moved = Callable[[NDArray[np.int64]], NDArray[np.int64]]
Normed = Callable[[Float64Array, Float64Array, float], Float64Array]


@dataclass(frozen=True, slots=True)
class ChangedStep:
    """One step of a block that is not what the definition says.

    more: how many keys of the future each query sees. query, key: what becomes of the positions of either side; where
    tables are given instead, any such change means that it is not rotated. norm: RMSNorm from (c, gain, eps). keep:
    what is kept of the latents.
    """

    more: int = 0
    query: Moved | None = None
    key: Moved | None = None
    norm: Normed | None = None
    keep: Callable[[Float64Array], Float64Array] | None = None


def with_step(failing: FailingCase, says: str, changed_step: ChangedStep) -> Counterfactual:
    made = _mla if failing.case.op == "mla_block" else _gqa
    return Counterfactual(says, block=lambda key, rows: made(failing.case, key, rows, changed_step))


def _whole(
    ar: BallArithmetic,
    key: Key,
    s: gqa_block_case.Sequence | mla_block_case.Sequence,
    parts: list[Attended[Ball]],
    out: Ball,
    seen: Bools,
) -> Block:
    values: dict[str, Ball] = {"out": out}
    for h, part in enumerate(parts):
        values |= {f"{h}.{name}": getattr(part, name) for name in gqa_block_case.PARTS}
    return Block(key, s.rows, ar, values, np.zeros(len(s.rows), dtype=bool), s.undefined, seen)


def _seen(rows: Rows, keys: int, changed_step: ChangedStep) -> Bools:
    return np.asarray(np.arange(keys)[None, :] <= np.asarray(rows)[:, None] + changed_step.more)


def _gqa(case: Case, key: Key, rows: Rows, changed_step: ChangedStep) -> Block:
    ar = BallArithmetic()
    with ar.working():
        s, n = gqa_block_case.sequence(case, key, rows), gqa_block_case.sizes(case)
        seen, place = _seen(rows, len(s.x), changed_step), np.asarray(rows)

        def side(where: NDArray[np.int64], moved: Moved | None) -> gqa_block.Side[Ball]:
            cos, sin = s.cos[where], s.sin[where]
            if moved is not None:
                cos, sin = np.ones_like(cos), np.zeros_like(sin)
            return gqa_block.Side(*(ar.const(a) for a in (s.x[where], cos, sin)))

        weights = gqa_block.Weights(*(ar.const(s.weights[name]) for name in ("w_q", "w_k", "w_v", "w_o")))
        parts, out = gqa_block.gqa_block(
            ar, side(place, changed_step.query), side(np.arange(len(s.x)), changed_step.key), weights,
            heads=n.heads, kv_heads=n.kv_heads, dim=n.dim, visible=seen,
        )  # fmt: skip
        return _whole(ar, key, s, parts, out, seen)


def _mla(case: Case, key: Key, rows: Rows, changed_step: ChangedStep) -> Block:
    ar = BallArithmetic()
    with ar.working():
        s = mla_block_case.sequence(case, key, rows)
        seen, layout = _seen(rows, len(s.x), changed_step), str(mla_block_case.chosen(case, "layout"))

        def moved(how: Moved | None) -> mla_block_case.Sequence:
            return s if how is None else replace(s, positions=how(s.positions))

        own = mla_block_case.sides(ar, case, moved(changed_step.query))[0]
        others = mla_block_case.sides(ar, case, moved(changed_step.key))[1]
        weights = mla_block_case.weights_of(ar, case, s)
        if changed_step.norm is not None:
            # Latents that are normalised already take the place of x.
            c_kv, c_q = (_normed(case, s, changed_step.norm, side) for side in ("kv", "q"))
            own = replace(own, x=ar.const(c_q[np.asarray(rows)]))
            kept = mla_block.latents(ar, others, replace(weights, norm_kv=None), layout)
            kept = replace(kept, c_kv=ar.const(c_kv))
            weights = replace(weights, w_dq=ar.const(np.eye(c_q.shape[1])), norm_q=None)
        else:
            kept = mla_block.latents(ar, others, weights, layout)
        if changed_step.keep is not None:
            kept = replace(kept, c_kv=ar.const(changed_step.keep(ar.to_enclosure(kept.c_kv)[0])))
        parts, out = mla_block.from_latents(
            ar, own, kept, weights, scale=mla_block_case.scale_value(ar, case), layout=layout, visible=seen
        )
        return _whole(ar, key, s, parts, out, seen)


def _normed(case: Case, s: mla_block_case.Sequence, norm: Normed, side: str) -> Float64Array:
    c = s.x @ s.weights[f"w_d{side}"].T
    gain = s.gains[f"norm_{side}"]
    return c if gain is None else norm(c, gain, float(mla_block_case.chosen(case, "eps")))
