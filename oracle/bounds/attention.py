"""G1 for attention forward: the derived bound of O and L under a contract, one formula for naive and tiled kernels.

    |dO| <= E + H (|O| + E) + omega_o,   E = W + kP Z + U        (terms: `oracle.bounds.forward`)

Score error, with A_j = alpha sum |q||k_j|: the dot product's chain, roundings of the scale and of stored operands
(which follow A, not S), stored scores (which follow |S|), bias. Sums over visible keys; a row without any has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.bounds import forward
from oracle.bounds.contract import Constants, Contract, accumulation_error, constants, dot_error, row_sum_error
from oracle.bounds.table import Bounded
from oracle.case import Case
from oracle.enclosure import Block
from oracle.formats import FORMATS, Float64Array, Format, format_named, format_of
from oracle.ops.attention_case import clean_head, scale_float

# Entries of the [r, n] arrays that are worked on at a time.
CACHED = 2**15


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form; see `oracle.bounds.table.Bounds`."""
    q, k, v, bias, _, _ = clean_head(case, block.key, block.rows)
    input_format = format_of(case.arrays["q"])
    alpha = abs(scale_float(case)) * (1 + 2.0**-50)
    observed = formats.get("out", input_format), formats.get("lse", FORMATS["fp32"])
    # A few rows at a time keep the [r, n] arrays in cache.
    step = max(1, CACHED // max(1, len(k)))
    parts = []
    for start in range(0, max(1, len(q)), step):
        rows = slice(start, min(start + step, len(q)))
        head = _Head(q[rows], k, v, np.abs(k), np.abs(v), None if bias is None else bias[rows], alpha, input_format)
        piece = block if len(q) <= step else block.between(rows.start, rows.stop)
        with np.errstate(all="ignore"):
            parts.append(_bounds(head, piece, forms, observed))
    return [
        {name: _stacked([part[index][name] for part in parts]) for name in ("out", "lse")}
        for index in range(len(forms))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """One head's numbers: q [r, D], k [n, D], v [n, Dv], the magnitudes of the last two, bias [r, n] or None."""

    q: Float64Array
    k: Float64Array
    v: Float64Array
    k_magnitude: Float64Array
    v_magnitude: Float64Array
    bias: Float64Array | None
    alpha: float
    input_format: Format


def _bounds(
    head: _Head, block: Block, forms: Sequence[Contract], observed: tuple[Format, Format]
) -> list[dict[str, Bounded]]:
    out_format, lse_format = observed
    dims = head.q.shape[1]
    land = forward.landscape(block)
    raw = (np.abs(head.q) @ head.k_magnitude.T) * (1 + 2.0**-52 * (dims + 2))
    tilted, errors = [], []
    for form in forms:
        c = constants(form, head.input_format)
        eps = _score_error(head, raw, land, form, c)
        rho = forward.weight_error(eps, land, form, c)
        errors.append((c, eps, rho))
        tilted.append(forward.tilt(rho, land))
    out = block.part("out")
    found = forward.spread(head.v, out, [t.moved for t in tilted], land.visible)
    grow = forward.inflation(land, dims)
    results = []
    for form, (c, eps, rho), t, weighted in zip(forms, errors, tilted, found.weighted, strict=True):
        k_p = forward.cast_error(land, form, c)
        inner = forward.weights_part(t, weighted, found.farthest)
        inner = inner + k_p * forward.cast_part(t, head.v_magnitude, found.largest)
        inner = inner + forward.underflow_part(t, land, found, form, c) + c.omega_v * (1 + k_p)
        apart = forward.sweeps_apart(eps, rho, land, form, c)
        out_bound = forward.out_bound(inner, out, land, form, _with_output(c, out_format), apart=apart) * grow
        lse_bound = forward.lse_bound(t, rho, land, form, c, lse_format) * grow
        broken = _rows_may_overflow(head, raw, eps, land, form, c)
        # Where sums of V overflow float64 itself nothing can be computed, and nothing is promised.
        out_bound = np.where(np.isnan(out_bound) & broken, np.inf, out_bound)
        too_large = out.upper_abs() + out_bound >= out_format.overflow_threshold
        lse_too_large = land.lse_size + lse_bound >= lse_format.overflow_threshold
        results.append(
            {"out": Bounded(out_bound, broken | too_large), "lse": Bounded(lse_bound, broken | lse_too_large)}
        )
    return results


def _stacked(parts: list[Bounded]) -> Bounded:
    if len(parts) == 1:
        return parts[0]
    return Bounded(np.concatenate([p.bound for p in parts]), np.concatenate([p.may_overflow for p in parts]))


def _with_output(c: Constants, fmt: Format) -> Constants:
    # The observed dtype sets the output rounding; a wider output than declared can only be more exact.
    return c if fmt.unit_roundoff <= c.u_o else replace(c, u_o=fmt.unit_roundoff, omega_o=max(c.omega_o, fmt.omega))


def _score_error(
    head: _Head, raw: Float64Array, land: forward.Landscape, contract: Contract, c: Constants
) -> Float64Array:
    dims, bias, alpha = head.q.shape[1], head.bias, head.alpha
    eps = forward.dot_scores_error(
        raw * alpha,
        alpha,
        dims,
        dot_error(contract, c, dims),
        c,
        with_bias=bias is not None,
        operands=_operand_sums(head, land, c),
    )
    if bias is None:
        return forward.stored_scores_error(eps, land, alpha, contract, c)
    eps = eps + forward.SCORE_ROUNDINGS_WITH_BIAS * c.u * np.abs(bias)
    if not contract.score_stores:
        return np.asarray(eps)
    # Raw and scaled scores are stored before the bias joins them: their roundings follow |S - bias|, which is at most
    # |S| + |bias|. The sum is stored once more.
    stores = contract.score_stores + 1
    before = land.size + np.abs(bias)
    eps = eps + np.expm1(stores * np.log1p(c.u_S)) * (before + eps) + stores * (1 + alpha) * c.omega_S
    return np.asarray(eps)


def _operand_sums(head: _Head, land: forward.Landscape, c: Constants) -> Float64Array | float:
    """sum |q| + sum |k_j|: over all keys where its largest value does not matter, else key by key [r, n]."""
    of_q, of_k = np.abs(head.q).sum(axis=1, keepdims=True), head.k_magnitude.sum(axis=1)
    largest = float(of_q.max(initial=0.0) + of_k.max(initial=0.0))
    if largest * max(1.0, head.alpha) * c.omega_in < 2.0**-20 * c.e_exp:
        return largest
    return np.where(land.visible, of_q + of_k[None, :], 0.0)


def _rows_may_overflow(
    head: _Head, raw: Float64Array, eps: Float64Array, land: forward.Landscape, contract: Contract, c: Constants
) -> NDArray[np.bool_]:
    """[r, 1]: rows in which an intermediate of this contract may legally overflow."""
    # Half the range: factors such as log2 e, and partial sums larger than their total.
    limit = c.compute.max_finite / 2
    largest = np.where(land.visible, raw, 0.0).max(axis=1, keepdims=True, initial=0.0) * max(head.alpha, 1.0)
    # In base two the maximum itself leaves the range when all of a row is masked with the lowest finite number; below a
    # sensible maximum such keys do no harm.
    broken = (largest >= limit) | (land.max_size >= limit)
    # The output before its division: l times larger, and more under a maximum that lags.
    factor = np.exp(contract.lag) / land.total_inverse
    sums_limit, grown = limit, 1.0
    if contract.accumulator is not None:
        sums_limit = min(limit, _limit(contract.accumulator))
        grown = 1 + accumulation_error(contract, c, land.keys)
    before = grown if contract.normalised_p else grown * factor
    most = float(head.v_magnitude.max(initial=0.0))
    if not np.all(before * most < sums_limit):
        sums = (np.where(land.visible, land.p, 0.0) @ head.v_magnitude) * before
        broken |= ~(sums < sums_limit).all(axis=1, keepdims=True)
    if contract.row_sum not in ("unrounded", "rounded"):
        broken |= factor * (1 + row_sum_error(contract, c, land.keys)) >= _limit(contract.row_sum)
    if contract.score_stores:
        # Raw products, scaled ones and their sum with the bias are all stored.
        stored = np.maximum(largest * (1 + 2.0**-8), np.where(land.visible, land.size + eps, 0.0))
        broken |= (stored >= c.scores.overflow_threshold).any(axis=1, keepdims=True)
    return np.asarray(broken)


def _limit(name: str) -> float:
    # A sum whose weights are all off by their own errors as well; those are well below a factor of two where it
    # matters.
    return format_named(name).max_finite / 2
