"""Rows of attention in which a contract's own arithmetic may overflow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.bounds import forward
from oracle.bounds.attention.head import Head
from oracle.bounds.landscape import Landscape
from oracle.contract.constants import Constants, accumulation_error, row_sum_error
from oracle.contract.contract import Contract
from oracle.formats import Float64Array, format_named


def drift(eps: Float64Array, land: Landscape, contract: Contract, c: Constants) -> Float64Array | float:
    """x [r, 1]: the largest computed score's weight lies within e^-x and e^x; 0 where it is 1.

    x = u |m^| where the product of the computed maximum m^ and log2 e is rounded once. m^ is at most the largest
    S + eps, and at least the largest score less its eps.
    """
    if contract.scores.maximum == "exact":
        return 0.0
    scores = land.seen(land.scores, -np.inf)
    above = land.seen(land.scores + land.scores_rad + eps, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    below = np.take_along_axis(eps, scores.argmax(axis=-1, keepdims=True), axis=-1)
    off = np.maximum(np.maximum(above - land.shift, below), 0.0) + 2 * land.slack
    # The constant log2 e scale errs by 3u, and the exponent itself is rounded.
    return np.asarray(
        np.where(land.visible.any(axis=-1, keepdims=True), c.u * (1 + 8 * c.u) * (land.max_size + off), 0.0)
    )


def rows_may_overflow(
    head: Head,
    largest: Float64Array,
    eps: Float64Array,
    land: Landscape,
    contract: Contract,
    c: Constants,
    *,
    drift: Float64Array | float = 0.0,
) -> NDArray[np.bool_]:
    """[r, 1]: rows in which an intermediate of this contract may legally overflow, or all weights may underflow.

    largest [r, 1]: of all |q||k|, scaled or not. drift: see `drift`.
    """
    # Half the range: factors such as log2 e, and partial sums larger than their total.
    limit = c.compute.max_finite / 2
    # In base two the maximum itself leaves the range when all of a row is masked with the lowest finite number; below a
    # sensible maximum such keys do no harm.
    broken = (largest >= limit) | (land.max_size >= limit)
    if head.has_sink:
        broken |= forward.joined(land).top_size >= limit
    # The output before its division: l times larger, and more under a maximum that lags.
    # Weights and sums alike are off by the drift of the maximum, either way.
    drifted = np.exp(np.minimum(drift, forward.LARGEST_EXPONENT))
    lag = np.exp(contract.sums.lag) * drifted
    factor = lag / land.total_inverse
    if np.any(drift):
        # A weight is off by the errors of one exp and one score next to the largest as well.
        broken |= (contract.weights.scale * lag * (1 + 2.0**-10) >= c.weights.max_finite) | (factor >= limit)
    sums_limit, grown = limit, 1.0
    if contract.sums.accumulator is not None:
        sums_limit = min(limit, _limit(contract.sums.accumulator))
        grown = 1 + accumulation_error(contract, c, land.keys)
    weights, before = land.p, grown * (1.0 if contract.weights.normalised else factor)
    if contract.sums.splits > 1:
        # The maximum is that of a part, whichever keys it holds: no weight need be less than 1.
        total = np.maximum(land.visible.sum(axis=-1, keepdims=True), 1)
        weights, before = 1.0 / total, grown * lag * total
    elif head.has_sink:
        # A sink that joins at the end leaves maximum and sums as they are without it.
        there = forward.joined(land)
        fall = np.minimum(land.scores + land.scores_rad + land.slack - there.top, 1.0)
        weights = np.where(land.visible & (np.arange(land.keys) < land.keys - 1), np.exp(fall), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1.0)
        before = grown * (1.0 if contract.weights.normalised else lag * total)
    if not np.all(before * head.v_largest < sums_limit):
        sums = (np.where(land.visible, weights, 0.0) @ head.v_magnitude) * before
        broken |= ~(sums < sums_limit).all(axis=-1, keepdims=True)
    if contract.sums.row_sum not in ("unrounded", "rounded"):
        broken |= factor * (1 + row_sum_error(contract, c, land.keys)) >= _limit(contract.sums.row_sum)
    if contract.scores.stores:
        # Raw products, scaled ones and their sum with the bias are all stored.
        stored = np.maximum(largest * (1 + 2.0**-8), land.seen(land.size + eps))
        broken |= (stored >= c.scores.overflow_threshold).any(axis=-1, keepdims=True)
    return np.asarray(broken)


def _limit(name: str) -> float:
    # A sum whose weights are all off by their own errors as well; those are well below a factor of two where it
    # matters.
    return format_named(name).max_finite / 2
