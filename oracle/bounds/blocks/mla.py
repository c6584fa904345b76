"""G1 for mla_block: errors carried from the down-projections through norms, rotation and the core to the output.

`oracle.bounds.computed` has the steps of projections, norms, rotation and attention; `oracle.bounds.blocks.gqa` that of
the output projection. Tables err as in `oracle.bounds.rope.rotation`; the error of a scale that has YaRN's factor in it
(`oracle.bounds.rope.frequency`) counts as one of q. In the materialised form the core is attention of the
computed k = [W_UK c, k^R] and v = W_UV c. In the absorbed form q~ = W_UK^T q^C is computed and the keys are [c, k^R];
wrong weights, the cast of P and the row sum act on the exact v = W_UV c by linearity, as in
`oracle.bounds.mla.output`, and the latent sum has one more error, that of the latents themselves:

    y = M + D + ((1+u_div)(1+u_lat) - 1)(N + M) + omega_lat + w,   N and M of |c| + dc,
    D = min(G sum T_j dc_j, max dc)(1+kW)/(1-h),
    b = E2 + |W_UV| (y + c_dc (N + y)) + d_c w,   then stored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds import computed, forward
from oracle.bounds.blocks.gqa import output
from oracle.bounds.bounded import Bounded
from oracle.bounds.computed import Attended, Computed
from oracle.bounds.landscape import inflation
from oracle.bounds.rope import rotation as rope
from oracle.bounds.rope.frequency import frequencies_upper, magnitude_of, softmax_factor_error
from oracle.case import Case
from oracle.contract.constants import Constants, accumulation_error, compound, constants, row_sum_error, tiles
from oracle.contract.contract import Contract, LatentClaims
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.blocks.gqa_case import head_block
from oracle.ops.blocks.mla_case import Sequence as OneSequence
from oracle.ops.blocks.mla_case import chosen, rotation, scale_float, sequence, sequence_length, table_enclosure


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, E'] per form; see `oracle.bounds.table.Bounds`."""
    input_format = format_of(case.arrays["x"])
    observed = formats.get("out", input_format)
    s = sequence(case, block.key, block.rows)
    made: dict[Contract, _Operands] = {}
    results = []
    with np.errstate(all="ignore"):
        heads = [computed.head_of(head_block(block, h)) for h in range(len(s.weights["w_uk"]))]
        for form in forms:
            # Forms that differ in the attention alone have the same operands.
            latent = LatentClaims(between=form.latent.between, cache=form.latent.cache)
            common = Contract(arithmetic=form.arithmetic, rope=form.rope, latent=latent)
            if common not in made:
                made[common] = _operands(case, s, common, input_format)
            results.append({"out": _bound(case, block, s, heads, made[common], form, input_format, observed)})
    return results


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """q^C and rotated q^R per head, c^KV as kept, rotated k^R, and rows [r, 1] in which one of them may overflow."""

    q_nope: list[Computed]
    q_pe: list[Computed]
    c_kv: Computed
    k_pe: Computed
    broken: NDArray[np.bool_]


def _operands(case: Case, s: OneSequence, form: Contract, input_format: Format) -> _Operands:
    c, rows = constants(form, input_format), np.asarray(s.rows)
    between = computed.store_of(form.latent.between, input_format, form, c)
    turning = computed.turning_of(form.rope.rotate, input_format, form, c, between)
    layout, eps = str(chosen(case, "layout")), float(chosen(case, "eps"))
    table, far = _table(case, s, form, input_format, c)
    own = computed.Table(*(part[rows] for part in (table.cos, table.sin, table.rad, table.wrong_cos, table.wrong_sin)))  # type: ignore[index]
    x = computed.exact(s.x)

    def down(given: Computed, name: str, norm: str) -> list[Computed]:
        made = computed.projected(given, s.weights[name], form, c, between)
        gain = s.gains[norm]
        return [made] if gain is None else [made, computed.normed(made, gain, eps, c, between)]

    latents, queries = down(x, "w_dkv", "norm_kv"), down(x.rows(rows), "w_dq", "norm_q")
    kept = latents[-1]
    if form.latent.cache is not None:
        kept = computed.cached(kept, input_format if form.latent.cache == "input" else FORMATS[form.latent.cache], c)
        kept = computed.stored(kept, between)
    raw_k = computed.projected(x, s.weights["w_kr"], form, c, between)
    k_pe = computed.turned(raw_k, table, turning, layout)
    q_nope = [computed.projected(queries[-1], w, form, c, between) for w in s.weights["w_uq"]]
    raw_q = [computed.projected(queries[-1], w, form, c, between) for w in s.weights["w_qr"]]
    q_pe = [computed.turned(a, own, turning, layout) for a in raw_q]
    # A magnitude may come before the rotation or after it, so that one step overflows and the whole does not.
    size = magnitude_of(rotation(case).scaling, 0.0)[0]
    raw_q, raw_k = [a.times(max(1.0, size)) for a in raw_q], raw_k.times(max(1.0, size))
    steps_q, steps_k = [a.times(1 / min(1.0, size)) for a in q_pe], k_pe.times(1 / min(1.0, size))
    lost_q = np.any([computed.too_large(a, between, c) for a in (*queries, *q_nope, *raw_q, *steps_q)], axis=0)
    lost_k = np.any([computed.too_large(a, between, c) for a in (*latents, kept, raw_k, steps_k)], axis=0)
    lost_q, lost_k = lost_q | far[rows], lost_k | far
    # The squares of a norm's sum.
    limit = np.sqrt(c.compute.max_finite / 4)
    lost_q |= (queries[0].reach >= limit).any(axis=1) & (len(queries) > 1)
    lost_k |= (latents[0].reach >= limit).any(axis=1) & (len(latents) > 1)
    broken = lost_q[:, None] | (s.visible & lost_k).any(axis=1, keepdims=True)
    return _Operands(q_nope, q_pe, kept, k_pe, broken)


def _table(
    case: Case, s: OneSequence, form: Contract, input_format: Format, c: Constants
) -> tuple[computed.Table, NDArray[np.bool_]]:
    """cos and sin of the whole sequence with their errors as `oracle.bounds.rope.rotation` has them, and rows [S]
    whose angles are out of range."""

    def named(name: str | None) -> Format:
        return c.compute if name is None else input_format if name == "input" else FORMATS[name]

    how, length, at = rotation(case), sequence_length(case, s), s.positions[:, None]
    angle, stored = named(form.rope.angle), named(form.rope.table)
    cos, sin = table_enclosure(case, s)
    theta = frequencies_upper(how.base, how.rotary_dim, how.scaling, length)
    dth = rope.angle_error(at, theta, how, length, form, angle)
    omega = stored.smallest_normal if form.arithmetic.flush else stored.omega
    made = rope.Stored(*magnitude_of(how.scaling, c.u), c.u, stored.unit_roundoff, omega)
    rad = np.maximum(cos.rad + np.abs(cos.lo), sin.rad + np.abs(sin.lo)) + 2.0**-60
    wrong = (rope.table_error(part.upper_abs(), dth, made) for part in (cos, sin))
    return computed.Table(cos.hi, sin.hi, rad, *wrong), np.asarray(rope.out_of_range(at, theta, angle).any(axis=1))


def _bound(
    case: Case,
    block: Block,
    s: OneSequence,
    heads: list[computed.HeadBlock],
    given: _Operands,
    form: Contract,
    input_format: Format,
    observed: Format,
) -> Bounded:
    c = constants(form, input_format)
    between, up = (computed.store_of(name, input_format, form, c) for name in (form.latent.between, form.latent.up))
    alpha = abs(scale_float(case)) * (1 + 2.0**-50)
    in_scale = 0.0 if case.options.get("scale") is not None else softmax_factor_error(rotation(case).scaling, c.u)
    outs, wrongs, broken = [], [], given.broken
    for h, head in enumerate(heads):
        w_uk, w_uv = s.weights["w_uk"][h], s.weights["w_uv"][h]
        v = computed.projected(given.c_kv, w_uv, form, c, up)
        if form.latent.form == "materialised":
            k_nope = computed.projected(given.c_kv, w_uk, form, c, up)
            lost = computed.too_large(k_nope, up, c) | computed.too_large(v, up, c)
            broken = broken | (s.visible & lost).any(axis=1, keepdims=True)
            q, k = given.q_nope[h].beside(given.q_pe[h]), k_nope.beside(given.k_pe)
            made = computed.attended(q.off_by(in_scale), k, v, alpha, head, form, c, between)
        else:
            q_lat = computed.projected(given.q_nope[h], np.ascontiguousarray(w_uk.T), form, c, up)
            broken = broken | computed.too_large(q_lat, up, c)[:, None]
            q, k = q_lat.beside(given.q_pe[h]), given.c_kv.beside(given.k_pe)
            latent = computed.store_of(form.latent.summed, input_format, form, c)
            made = _absorbed(q.off_by(in_scale), k, given.c_kv, v, w_uv, alpha, head, form, c, latent, between)
        outs.append(head.out.upper_abs())
        wrongs.append(made.wrong)
        broken = broken | made.broken
    return output(np.hstack(outs), np.hstack(wrongs), s.weights["w_o"], block, form, input_format, observed, broken)


def _absorbed(
    q: Computed,
    k: Computed,
    c_kv: Computed,
    v: Computed,
    w_uv: Float64Array,
    alpha: float,
    head: computed.HeadBlock,
    contract: Contract,
    c: Constants,
    latent: computed.Store,
    heads: computed.Store,
) -> Attended:
    """One head in the absorbed form; v carries the exact W_UV c (its own error is not read)."""
    w, out, (d_v, d_c) = computed.weighed(q, k, alpha, head.land, contract, c), head.out, w_uv.shape
    land, tilted, n = w.land, w.tilted, w.land.keys
    h = row_sum_error(contract, c, n)
    if h >= 1:
        return Attended(np.full((len(q.mid), d_v), np.inf), np.zeros((len(q.mid), 1), dtype=bool))
    apart = forward.sweeps_apart(w.exponent, w.tilted, land, contract, c)
    shrink = (1 / (1 - h) + n * c.w) * (1 + apart)
    k_w = 0.0 if contract.sums.row_sum == "rounded" else c.u_P
    c_n = compound(accumulation_error(contract, c, n), c.u_v)
    u_div = c.u_div
    if contract.weights.normalised:
        k_w, u_div = k_w + c.u_div * (1 + k_w), 0.0
    if contract.sums.splits > 1:
        # Partial outputs are divided, weighted and merged per component of the latent.
        c_n = compound(c_n, c.u_div + c.u + (contract.sums.splits + 2) * c.u)
    found = computed.spread_of(v, out, w)
    common = forward.weights_part(tilted, found.weighted[0], found.farthest)
    common = common + k_w * forward.cast_part(tilted, v.size, found.largest)
    common = common + forward.underflow_part(tilted, land, found, contract, c)
    common = common + (out.upper_abs() + common) * (shrink - 1)
    factor = forward.per_row_sum(tilted, land)
    lost = (c.omega_P if contract.weights.normalised else factor * c.omega_P) + factor * c.w
    visible = land.visible.astype(np.float64)
    size = forward.cast_part(tilted, c_kv.reach, computed.largest_seen(c_kv.reach, land.visible)) * (1 + k_w)
    size = (size + lost * (visible @ c_kv.reach)) * shrink
    of_c = forward.cast_part(tilted, c_kv.wrong, computed.largest_seen(c_kv.wrong, land.visible)) * (1 + k_w)
    of_c = (of_c + lost * (visible @ c_kv.wrong)) * shrink
    summed = c_n * size + (factor * n * tiles(contract, n) * c.w_acc + n * c.w_acc) * shrink + c.omega_v * (1 + c_n)
    wrong = of_c + summed + compound(u_div, latent.unit) * (size + summed) + latent.omega + c.w
    across = np.abs(w_uv).T
    b = common + (wrong + computed.product_error(contract, c, d_c) * (size + wrong)) @ across + 2 * d_c * c.w
    b = b + max(heads.unit, c.u) * (out.upper_abs() + b) + max(heads.omega, c.compute.omega)
    b = b * inflation(land, q.mid.shape[1] + d_c)
    limit = c.compute.max_finite / 2
    broken = computed.scores_broken(w, alpha, contract, c)
    heavy = np.exp(contract.sums.lag) * size / land.total_inverse
    broken |= ((size + wrong >= latent.limit) | (heavy >= limit)).any(axis=1, keepdims=True)
    broken |= ((out.upper_abs() + b >= heads.limit) | ((size + wrong) @ across >= limit)).any(axis=1, keepdims=True)
    return Attended(b, np.asarray(broken))
