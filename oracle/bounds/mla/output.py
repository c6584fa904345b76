"""G1 for MLA: the derived bound of O and L, both evaluation orders, on the parts shared with attention.

Notation of `oracle.bounds.forward`; c_K the error of a dot product of K terms relative to sum |a||b|, w an
underflow, u_up, omega_up the storage of up-projected k^C, v and q~ (zero if kept in the compute format), u_lat,
omega_lat that of the latent sum; alpha = |scale|; r_j = |q^R|^T |k^R_j|.

A score is one chain over both of its parts, of which one factor x was itself computed, with |x^ - x| <= dx in
every entry, y being the other, stored factor:

    materialised: x = k^C_j, chain of d_h + d_r,
                  dx = (1+u_up)(c_dc |W_UK||c_j| + d_c w) + u_up |k^C_j| + omega_up
    absorbed:     x = q~, chain of d_c + d_r,
                  dx = (1+u_up)(c_dh |W_UK|^T|q^C| + d_h w) + u_up |q~| + omega_up
    eps_j = alpha dx.|y| + [attention's eps of A = alpha (|x|.|y| + dx.|y| + r_j)]

(the chain runs over the computed numbers, so it meets |x| + dx; the rope products meet the whole chain's error).

Output, materialised: E as in attention with |v| + dv in place of |v|, and the error of v itself through the worst
weights, E += (1 + kP) min(G sum T_j dv_j, max dv_j), dv like dx.

Output, absorbed: wrong weights, the cast of P and the denominator are the same numbers for every component of the
latent, so they act on v = W_UV c; everything else happens per component and passes through |W_UV|. kW is the cast
of P (and its division, if P is normalised); N bounds what the computed weights make of |c|; M holds accumulation,
operand rounding of c and the merge of splits; y is what is wrong with the latent z beyond E2:

    E1 = W + kW Z + U,  E2 = E1 + (|O| + E1) h / (1 - h)
    N = [(1+kW) min(G sum T_j |c_j|, max |c_j|) + (G/l)(omega_P + w) sum |c_j|] / (1-h)
    M = c_n N + [(G/l) n T w + n w] / (1-h)
    y = M + ((1+u_div)(1+u_lat) - 1)(N + M) + omega_lat + w
    b = E2 + |W_UV| (y + c_dc (N + y)) + d_c w,   |dO| <= b + u_o (|O| + b) + omega_o
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds import forward
from oracle.bounds.bounded import Bounded
from oracle.bounds.landscape import Landscape, inflation, landscape
from oracle.bounds.spread import Spread, spread, values_of
from oracle.case import Case
from oracle.contract.constants import (
    Constants,
    accumulation_error,
    compound,
    constants,
    dot_error,
    row_sum_error,
    tiles,
)
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.mla.case import Head, head, scale_float


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Upper bounds of magnitudes that one head's products reach; n keys, r rows.

    rope [r, n]; k, k_env [n, d_h]; v, v_env [n, d_v] (v also as midpoints with radius v_rad); q_lat, q_env [r, d_c].
    ``x_env`` is the sum of the magnitudes of the products that x is made of.
    """

    rope: Float64Array
    k: Float64Array
    k_env: Float64Array
    v_mid: Float64Array
    v_rad: Float64Array
    v: Float64Array
    v_env: Float64Array
    q_lat: Float64Array
    q_env: Float64Array


def _sizes(a: Head) -> _Sizes:
    q, c, w_uk, w_uv = np.abs(a.q_nope), np.abs(a.c_kv), np.abs(a.w_uk), np.abs(a.w_uv)
    d_h, d_c = a.w_uk.shape
    # float64 products of float64 numbers: |error| <= gamma_K sum |a||b|; 4 (K + 2) 2^-53 covers it and that sum's own.
    slack_c, slack_h = 2.0**-51 * (d_c + 2), 2.0**-51 * (d_h + 2)
    k_env, v_env, q_env = c @ w_uk.T, c @ w_uv.T, q @ w_uk
    v_mid = a.c_kv @ a.w_uv.T
    return _Sizes(
        rope=np.abs(a.q_pe) @ np.abs(a.k_pe).T,
        k=np.abs(a.c_kv @ a.w_uk.T) + slack_c * k_env,
        k_env=k_env,
        v_mid=v_mid,
        v_rad=slack_c * v_env,
        v=np.abs(v_mid) + slack_c * v_env,
        v_env=v_env,
        q_lat=np.abs(a.q_nope @ a.w_uk) + slack_h * q_env,
        q_env=q_env,
    )


@dataclass(frozen=True, slots=True)
class _Store:
    """How a stage is stored: relative and absolute rounding (zero if kept wide), and where it overflows."""

    unit: float
    omega: float
    limit: float


def _store(name: str | None, input_format: Format, contract: Contract, c: Constants) -> _Store:
    # Half the range, as for every intermediate: partial sums may be that much larger than their total.
    plain = _Store(0.0, 0.0, c.compute.max_finite / 2)
    if name is None:
        return plain
    fmt = input_format if name == "input" else FORMATS[name]
    if fmt.precision >= c.compute.precision:
        return plain
    omega = fmt.smallest_normal if contract.arithmetic.flush else fmt.omega
    return _Store(fmt.unit_roundoff, omega, fmt.overflow_threshold)


def _product_error(contract: Contract, c: Constants, terms: int) -> float:
    """c_K of a projection, both operands rounded by u_v (tf32) first."""
    return compound(dot_error(contract, c, terms), c.u_v, c.u_v)


def _computed_error(
    size: Float64Array, envelope: Float64Array, terms: int, store: _Store, contract: Contract, c: Constants
) -> Float64Array:
    """dx: error of an up-projected vector, from |x| and the sum of |a||b| behind it."""
    chain = _product_error(contract, c, terms) * envelope + terms * c.w
    return np.asarray(chain * (1 + store.unit) + store.unit * size + store.omega)


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """One form at work on one block: constants, the scores' error eps and reach (sum |.||.|), the weights."""

    contract: Contract
    c: Constants
    up: _Store
    eps: Float64Array
    exponent: Float64Array
    reach: Float64Array
    rho: Float64Array
    tilted: forward.Tilted

    def product_error(self, terms: int) -> float:
        return _product_error(self.contract, self.c, terms)

    def computed_error(self, size: Float64Array, envelope: Float64Array, terms: int) -> Float64Array:
        return _computed_error(size, envelope, terms, self.up, self.contract, self.c)

    @property
    def limit(self) -> float:
        return self.c.compute.max_finite / 2


def _form(
    a: Head,
    sizes: _Sizes,
    alpha: float,
    land: Landscape,
    contract: Contract,
    c: Constants,
    up: _Store,
) -> _Form:
    (d_h, d_c), d_r = a.w_uk.shape, a.q_pe.shape[1]
    if contract.latent.form == "materialised":
        other = np.abs(a.q_nope)
        wrong = other @ _computed_error(sizes.k, sizes.k_env, d_c, up, contract, c).T
        magnitude, dims = other @ sizes.k.T, d_h + d_r
    else:
        other = np.abs(a.c_kv)
        wrong = _computed_error(sizes.q_lat, sizes.q_env, d_h, up, contract, c) @ other.T
        magnitude, dims = sizes.q_lat @ other.T, d_c + d_r
    reach = magnitude + wrong + sizes.rope
    dot = dot_error(contract, c, dims)
    if contract.latent.form == "materialised":
        operands = (np.abs(a.q_nope).sum(axis=1) + np.abs(a.q_pe).sum(axis=1))[:, None] + (
            (sizes.k + _computed_error(sizes.k, sizes.k_env, d_c, up, contract, c)).sum(axis=1)
            + np.abs(a.k_pe).sum(axis=1)
        )
    else:
        computed = sizes.q_lat + _computed_error(sizes.q_lat, sizes.q_env, d_h, up, contract, c)
        operands = (computed.sum(axis=1) + np.abs(a.q_pe).sum(axis=1))[:, None] + (
            np.abs(a.c_kv).sum(axis=1) + np.abs(a.k_pe).sum(axis=1)
        )
    eps = alpha * wrong + forward.dot_scores_error(
        alpha * reach, alpha, dims, dot, c, with_bias=False, operands=operands
    )
    eps = forward.stored_scores_error(eps, land.size, alpha, contract, c)
    exponent = forward.exponent_error(eps, land, c)
    rho = forward.weight_error(eps, exponent, land, contract, c)
    return _Form(contract, c, up, eps, exponent, reach, rho, forward.tilt(rho, land))


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, d_v] and ``lse`` [r, 1] per form; see `oracle.bounds.table.Bounds`."""
    a = head(case, block.key, block.rows)
    input_format = format_of(case.arrays["q_nope"])
    out_format, lse_format = formats.get("out", input_format), formats.get("lse", FORMATS["fp32"])
    land = landscape(block)
    alpha = abs(scale_float(case)) * (1 + 2.0**-50)
    out = block.part("out")
    with np.errstate(all="ignore"):
        sizes = _sizes(a)
        prepared = []
        for contract in forms:
            c = forward.with_output(constants(contract, input_format), out_format)
            up = _store(contract.latent.up, input_format, contract, c)
            prepared.append(_form(a, sizes, alpha, land, contract, c, up))
        # v is known to within v_rad only: the widest of each column widens all distances |v - O|.
        vague = sizes.v_rad.max(axis=0, initial=0.0)
        near = Enclosure(out.hi, out.lo, out.rad + vague)
        found = spread(values_of(sizes.v_mid, out.hi), near, [form.tilted.moved for form in prepared], land.visible)
        found = replace(found, largest=found.largest + vague, size=found.size + land.keys * vague)
        grow = inflation(land, 2 * sum(a.w_uk.shape) + a.q_pe.shape[1] + a.w_uv.shape[0])
        results = []
        for form, weighted in zip(prepared, found.weighted, strict=True):
            wrong_weights = forward.weights_part(form.tilted, weighted, found.farthest)
            if form.contract.latent.form == "materialised":
                out_bound, broken = _materialised(a, sizes, wrong_weights, found, out, land, form)
            else:
                latent = _store(form.contract.latent.summed, input_format, form.contract, form.c)
                out_bound, broken = _absorbed(a, sizes, wrong_weights, found, out, land, form, latent)
            out_bound = out_bound * grow
            lse_bound = forward.lse_bound(form.tilted, form.rho, land, form.contract, form.c, lse_format) * grow
            rows = broken.rows | _scores_may_overflow(alpha, land, form)
            cells = broken.cells | (out.upper_abs() + out_bound >= out_format.overflow_threshold)
            results.append(
                {
                    "out": Bounded(out_bound, rows | cells),
                    "lse": Bounded(lse_bound, rows | (land.lse_size + lse_bound >= lse_format.overflow_threshold)),
                }
            )
    return results


def agreement(
    case: Case, block: Block, materialised: Contract, absorbed: Contract, formats: Mapping[str, Format]
) -> dict[str, Bounded]:
    """How far outputs of a materialised and an absorbed kernel may differ: the sum of their bounds (P26)."""
    first, second = bounds(case, block, (materialised, absorbed), formats)
    return {
        name: Bounded(first[name].bound + second[name].bound, first[name].may_overflow | second[name].may_overflow)
        for name in first
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Broken:
    """Where a projection or the latent may legally overflow: whole rows [r, 1], single outputs [r, d_v]."""

    rows: NDArray[np.bool_]
    cells: NDArray[np.bool_]


def _materialised(
    a: Head,
    sizes: _Sizes,
    wrong_weights: Float64Array,
    found: Spread,
    out: Enclosure,
    land: Landscape,
    form: _Form,
) -> tuple[Float64Array, _Broken]:
    d_c = a.c_kv.shape[1]
    wrong_v = form.computed_error(sizes.v, sizes.v_env, d_c)
    of_v = forward.cast_part(form.tilted, wrong_v, _largest_seen(wrong_v, land))
    k_p = forward.cast_error(land, form.contract, form.c)
    inner = wrong_weights + k_p * forward.cast_part(form.tilted, sizes.v, found.largest) + (1 + k_p) * of_v
    # Underflows meet the computed v.
    all_wrong = land.visible.astype(np.float64) @ wrong_v
    reached = replace(found, distance=found.distance + all_wrong, size=found.size + all_wrong)
    inner = inner + forward.underflow_part(form.tilted, land, reached, form.contract, form.c)

    wrong_k = form.computed_error(sizes.k, sizes.k_env, d_c)
    keys = np.any((sizes.k + wrong_k >= form.up.limit) | (sizes.k_env >= form.limit), axis=1)
    rows = np.asarray(np.any(land.visible & keys, axis=1, keepdims=True))
    # An infinite v spoils its column in every row, those that may not see the key included (0 * inf).
    columns = ((sizes.v + wrong_v >= form.up.limit) | (sizes.v_env >= form.limit)).any(axis=0)
    heavy = (found.largest + of_v) / land.total_inverse >= form.limit
    inner = inner + form.c.omega_v * (1 + k_p)
    apart = forward.sweeps_apart(form.exponent, form.tilted, land, form.contract, form.c)
    return forward.out_bound(inner, out, land, form.contract, form.c, apart=apart), _Broken(
        rows, np.asarray(columns | heavy)
    )


def _absorbed(
    a: Head,
    sizes: _Sizes,
    wrong_weights: Float64Array,
    found: Spread,
    out: Enclosure,
    land: Landscape,
    form: _Form,
    latent: _Store,
) -> tuple[Float64Array, _Broken]:
    contract, c, tilted, n, (d_h, d_c) = form.contract, form.c, form.tilted, land.keys, a.w_uk.shape
    h = row_sum_error(contract, c, n)
    if h >= 1:
        nothing = np.full(out.hi.shape, np.inf)
        return nothing, _Broken(np.zeros((len(nothing), 1), dtype=bool), np.zeros(nothing.shape, dtype=bool))
    # A normalised P is divided by a sum that may have been taken in an earlier sweep.
    apart = forward.sweeps_apart(form.exponent, form.tilted, land, contract, c)
    shrink = (1 / (1 - h) + n * c.w) * (1 + apart)
    k_w = 0.0 if contract.sums.row_sum == "rounded" else c.u_P
    c_n = compound(accumulation_error(contract, c, n), c.u_v)
    u_div = c.u_div
    if contract.weights.normalised:
        k_w, u_div = k_w + c.u_div * (1 + k_w), 0.0
    if contract.sums.splits > 1:
        # Partial outputs are divided, weighted and merged per component of the latent.
        c_n = compound(c_n, c.u_div + c.u + (contract.sums.splits + 2) * c.u)
    common = wrong_weights + k_w * forward.cast_part(tilted, sizes.v, found.largest)
    common = common + forward.underflow_part(tilted, land, found, contract, c)
    common = common + (out.upper_abs() + common) * (shrink - 1)

    latents = np.abs(a.c_kv)
    factor = forward.per_row_sum(tilted, land)
    lost = (c.omega_P if contract.weights.normalised else factor * c.omega_P) + factor * c.w
    size = forward.cast_part(tilted, latents, _largest_seen(latents, land)) * (1 + k_w)
    size = (size + lost * (land.visible.astype(np.float64) @ latents)) * shrink
    summed = c_n * size + (factor * n * tiles(contract, n) * c.w_acc + n * c.w_acc) * shrink + c.omega_v * (1 + c_n)
    wrong = summed + compound(u_div, latent.unit) * (size + summed) + latent.omega + c.w
    w_uv = np.abs(a.w_uv).T
    b = common + (wrong + form.product_error(d_c) * (size + wrong)) @ w_uv + d_c * c.w

    wrong_q = form.computed_error(sizes.q_lat, sizes.q_env, d_h)
    lost_q = np.any((sizes.q_lat + wrong_q >= form.up.limit) | (sizes.q_env >= form.limit), axis=1, keepdims=True)
    # Before the division the sum is l times larger.
    lost_z = (size + wrong >= latent.limit) | (size / land.total_inverse >= form.limit)
    rows = np.asarray(lost_q | np.any(lost_z, axis=1, keepdims=True))
    cells = (size + wrong) @ w_uv >= form.limit
    return b + c.u_o * (out.upper_abs() + b) + c.omega_o, _Broken(rows, np.asarray(cells))


def _largest_seen(magnitude: Float64Array, land: Landscape) -> Float64Array:
    """[r, columns]: the largest entry of each column over the row's visible keys."""
    if bool(land.visible.all()):
        return np.broadcast_to(magnitude.max(axis=0, initial=0.0), (len(land.visible), magnitude.shape[1]))
    return np.stack([magnitude[seen].max(axis=0, initial=0.0) for seen in land.visible])


def _scores_may_overflow(alpha: float, land: Landscape, form: _Form) -> NDArray[np.bool_]:
    """[r, 1]: rows in which a dot product or a stored score, raw or scaled, may legally overflow."""
    seen = np.where(land.visible, form.reach, 0.0).max(axis=1, keepdims=True, initial=0.0)
    broken = seen * max(alpha, 1.0) >= form.limit
    if form.contract.scores.stores:
        scaled = np.where(land.visible, land.size + form.eps, 0.0).max(axis=1, keepdims=True, initial=0.0)
        broken |= np.maximum(seen, scaled) >= form.c.scores.overflow_threshold
    return np.asarray(broken)
