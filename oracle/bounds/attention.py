"""G1 for attention forward: the derived bound of O and L under a contract, one formula for naive and tiled kernels.

    |dO| <= E + H (|O| + E) + omega_o,   E = W + kP Z + U        (terms: `oracle.bounds.forward`)

Score error, with A_j = alpha sum |q||k_j|: the dot product's chain, roundings of the scale and of stored operands (which follow
A, not S), stored scores (which follow |S|), bias. Sums over visible keys; a row without any has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.bounds import forward
from oracle.bounds.contract import Constants, Contract, accumulation_error, constants, dot_error, row_sum_error
from oracle.bounds.table import Bounded
from oracle.case import Case
from oracle.enclosure import Block
from oracle.formats import FORMATS, Float64Array, Format, format_named, format_of
from oracle.ops.attention_case import clean_head, scale_float


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form; see `oracle.bounds.table.Bounds`."""
    q, k, v, bias, _, _ = clean_head(case, block.key, block.rows)
    input_format = format_of(case.arrays["q"])
    land = forward.landscape(block)
    alpha = abs(scale_float(case)) * (1 + 2.0**-50)
    dims = q.shape[1]
    out_format, lse_format = formats.get("out", input_format), formats.get("lse", FORMATS["fp32"])
    with np.errstate(all="ignore"):
        raw = (np.abs(q) @ np.abs(k).T) * (1 + 2.0**-52 * (dims + 2))
        tilted, all_constants, exponents = [], [], []
        for form in forms:
            c = constants(form, input_format)
            operands = _operand_sums(q, k, land, c)
            eps = _score_error(raw * alpha, alpha, dims, bias, land, form, c, operands)
            rho = forward.weight_error(eps, land, form, c)
            exponents.append((eps, rho))
            tilted.append(forward.tilt(rho, land))
            all_constants.append(c)
        out = block.part("out")
        found = forward.spread(v, out, [t.moved for t in tilted], block.visible_keys())
        magnitude = np.abs(v)
        grow = forward.inflation(land, dims)
        results = []
        for index, (form, c, t) in enumerate(zip(forms, all_constants, tilted, strict=True)):
            eps, rho = exponents[index]
            inner = forward.weights_part(t, found.weighted[index], found.farthest)
            k_p = forward.cast_error(land, form, c)
            inner = inner + k_p * forward.cast_part(t, magnitude, found.largest)
            inner = inner + forward.underflow_part(t, land, found, form, c) + c.omega_v * (1 + k_p)
            c_out = _with_output(c, out_format)
            out_bound = forward.out_bound(inner, out, land, form, c_out) * grow
            lse_bound = forward.lse_bound(t, rho, land, form, c, lse_format) * grow
            broken = _rows_may_overflow(raw, alpha, eps, land, form, c, magnitude)
            # Where sums of V overflow float64 itself nothing can be computed, and nothing is promised.
            out_bound = np.where(np.isnan(out_bound) & broken, np.inf, out_bound)
            results.append(
                {
                    "out": Bounded(out_bound, broken | (out.upper_abs() + out_bound >= out_format.overflow_threshold)),
                    "lse": Bounded(lse_bound, broken | (land.lse_size + lse_bound >= lse_format.overflow_threshold)),
                }
            )
    return results


def _with_output(c: Constants, fmt: Format) -> Constants:
    # The observed dtype sets the output rounding; a wider output than declared can only be more exact.
    return c if fmt.unit_roundoff <= c.u_o else replace(c, u_o=fmt.unit_roundoff, omega_o=max(c.omega_o, fmt.omega))


def _score_error(
    magnitude: Float64Array,
    alpha: float,
    dims: int,
    bias: Float64Array | None,
    land: forward.Landscape,
    contract: Contract,
    c: Constants,
    operands: Float64Array | float,
) -> Float64Array:
    dot = dot_error(contract, c, dims)
    eps = forward.dot_scores_error(magnitude, alpha, dims, dot, c, with_bias=bias is not None, operands=operands)
    if bias is None:
        return forward.stored_scores_error(eps, land, alpha, contract, c)
    eps = eps + forward.SCORE_ROUNDINGS_WITH_BIAS * c.u * np.abs(bias)
    if not contract.score_stores:
        return np.asarray(eps)
    # Raw and scaled scores are stored before the bias joins them: their roundings follow |S - bias|, at most |S| + |bias|.
    # The sum is stored once more.
    stores = contract.score_stores + 1
    before = land.size + np.abs(bias)
    eps = eps + np.expm1(stores * np.log1p(c.u_S)) * (before + eps) + stores * (1 + alpha) * c.omega_S
    return np.asarray(eps)


def _operand_sums(q: Float64Array, k: Float64Array, land: forward.Landscape, c: Constants) -> Float64Array | float:
    """sum |q| + sum |k_j|: over all keys where its largest value does not matter, else key by key [r, n]."""
    of_q, of_k = np.abs(q).sum(axis=1, keepdims=True), np.abs(k).sum(axis=1)
    largest = float(of_q.max(initial=0.0) + of_k.max(initial=0.0))
    if largest * c.omega_in < 2.0**-20 * c.e_exp:
        return largest
    return np.where(land.visible, of_q + of_k[None, :], 0.0)


def _rows_may_overflow(
    raw: Float64Array,
    alpha: float,
    eps: Float64Array,
    land: forward.Landscape,
    contract: Contract,
    c: Constants,
    v_magnitude: Float64Array,
) -> NDArray[np.bool_]:
    """[r, 1]: rows in which an intermediate of this contract may legally overflow."""
    # Half the range: factors such as log2 e, and partial sums larger than their total.
    limit = c.compute.max_finite / 2
    seen = np.where(land.visible, raw, 0.0)
    largest = seen.max(axis=1, keepdims=True, initial=0.0) * max(alpha, 1.0)
    broken = largest >= limit
    # The output before its division: l times larger, and more under a maximum that lags.
    factor = np.exp(contract.lag) / land.total_inverse
    sums = (np.where(land.visible, land.p, 0.0) @ v_magnitude) * (1.0 if contract.normalised_p else factor)
    if contract.accumulator is not None:
        sums, limit = sums * (1 + accumulation_error(contract, c, land.keys)), min(limit, _limit(contract.accumulator))
    broken |= ~(sums < limit).all(axis=1, keepdims=True)
    if contract.row_sum not in ("unrounded", "rounded"):
        broken |= factor * (1 + row_sum_error(contract, c, land.keys)) >= _limit(contract.row_sum)
    if contract.score_stores:
        # Raw products, scaled ones and their sum with the bias are all stored.
        stored = np.maximum(largest * (1 + 2.0**-8), np.where(land.visible, land.size + eps, 0.0))
        broken |= (stored >= c.scores.overflow_threshold).any(axis=1, keepdims=True)
    return np.asarray(broken)


def _limit(name: str) -> float:
    # A sum whose weights are all off by their own errors as well; those are well below a factor of two where it matters.
    return format_named(name).max_finite / 2
