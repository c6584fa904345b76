"""How far the scores of one head may be off: products, stored operands and scores, soft cap, bias."""

from __future__ import annotations

import numpy as np

from oracle.block import Block
from oracle.bounds import forward
from oracle.bounds.attention.head import Head, with_zero
from oracle.bounds.landscape import Landscape
from oracle.contract.constants import Constants, compound, dot_error
from oracle.contract.contract import Contract
from oracle.formats import Float64Array


def score_error(
    head: Head, raw: Float64Array, land: Landscape, block: Block, contract: Contract, c: Constants
) -> Float64Array:
    dims, bias, alpha = head.q.shape[-1], head.bias, head.alpha
    eps = forward.dot_scores_error(
        raw * alpha,
        alpha,
        dims,
        dot_error(contract, c, dims),
        c,
        with_bias=bias is not None,
        operands=operand_sums(head, land, c),
    )
    if head.descaled:
        # Two more constants in the scale, or one more rounding of q and of k.
        eps = eps + 2 * c.u * (1 + 2.0**-7) * raw * alpha
    if head.softcap is None:
        return eps_with_bias(eps, bias, land.size, alpha, contract, c, joins=head.joins)
    before = _before_cap(head, block)
    if head.cap_last:
        # The bias joins before the cap, and is rounded with what the cap is applied to.
        eps = eps_with_bias(eps, bias, before[1], alpha, contract, c, joins=head.joins)
        return _capped(eps, head, before, contract, c)
    eps = _capped(eps_with_bias(eps, None, before[1], alpha, contract, c), head, before, contract, c)
    if bias is None:
        return eps
    eps = eps + forward.SCORE_ROUNDINGS_WITH_BIAS * c.u * bias
    if contract.scores.stores and head.joins > 1:
        eps = eps + c.u_S * (np.minimum(before[1], head.softcap) + bias + eps) + c.omega_S
    if contract.scores.stores:
        eps = eps + c.u_S * (land.size + eps) + c.omega_S
    return np.asarray(eps)


def eps_with_bias(
    eps: Float64Array,
    bias: Float64Array | None,
    size: Float64Array,
    alpha: float,
    contract: Contract,
    c: Constants,
    *,
    joins: int = 1,
) -> Float64Array:
    """eps after a bias joined, in ``joins`` sums, and scores were stored as often as the contract says.

    ``size`` bounds |S|.
    """
    if bias is None:
        return forward.stored_scores_error(eps, size, alpha, contract, c)
    eps = eps + forward.SCORE_ROUNDINGS_WITH_BIAS * c.u * bias
    if not contract.scores.stores:
        return np.asarray(eps)
    # Raw and scaled scores are stored before the bias joins them: their roundings follow |S - bias|, which is at most
    # |S| + |bias|. The sum is stored once more.
    stores = contract.scores.stores + joins
    before = size + bias
    eps = eps + np.expm1(stores * np.log1p(c.u_S)) * (before + eps) + stores * (1 + alpha) * c.omega_S
    return np.asarray(eps)


def _before_cap(head: Head, block: Block) -> tuple[Float64Array, Float64Array]:
    """Lower and upper bound of |x| for what the soft cap is applied to [r, n]; 0 for the sink, which is not capped."""
    given = block.part("uncapped")
    both = np.maximum(np.abs(given.hi) - np.abs(given.lo) - given.rad, 0.0), given.upper_abs()
    low, high = (with_zero(size) if head.has_sink else size for size in both)
    return low, high


def _capped(
    eps: Float64Array, head: Head, before: tuple[Float64Array, Float64Array], contract: Contract, c: Constants
) -> Float64Array:
    """eps of c tanh(x / c) from that of x, where |x| lies in ``before``."""
    assert head.softcap is not None
    cap, (low, high) = head.softcap, before
    if contract.scores.stores:
        # The quotient is stored too.
        eps = eps + c.u_S * (high + eps) + cap * c.omega_S
    moved = cap * tanh_moves(low / cap, high / cap, eps / cap)
    after = np.minimum(cap * np.tanh(high / cap) * (1 + 2.0**-48) + moved, cap)
    # tanh, the product with the cap (the cap and log2 e as constants, their product), two sums with biases.
    eps = moved + compound(c.e_tanh, c.g(6)) * after + cap * (1 + c.g(6)) * (c.e_tanh_abs + 2 * c.w)
    if contract.scores.stores:
        eps = eps + np.expm1(2 * np.log1p(c.u_S)) * (after + eps) + (1 + cap) * c.omega_S
    return np.asarray(eps)


def tanh_moves(low: Float64Array, high: Float64Array, error: Float64Array) -> Float64Array:
    """Upper bound of |tanh(x + e) - tanh x| for low <= |x| <= high, |e| <= error.

    The most is tanh a - tanh(a - error) = sinh(error) / (cosh a cosh(a - error)) at the a in [low, high] nearest to
    error / 2; written without differences of nearly equal numbers.
    """
    a = np.maximum(low, np.minimum(error / 2, high))
    b = a - error - 2.0**-50 * a
    share = -2 * np.expm1(-2 * error) / ((1 + np.exp(-2 * a)) * (1 + np.exp(-2 * np.abs(b))))
    return np.asarray(share * np.exp(-2 * np.maximum(b, 0.0)))


def operand_sums(head: Head, land: Landscape, c: Constants) -> Float64Array:
    """sum |q| + sum |k_j|: over all keys [1, 1] where its largest value does not matter, else key by key [r, n]."""
    of_q, of_k = np.abs(head.q).sum(axis=-1, keepdims=True), head.k_magnitude.sum(axis=-1)[..., None, :]
    largest = of_q.max(axis=-2, keepdims=True, initial=0.0) + of_k.max(axis=-1, keepdims=True, initial=0.0)
    little = largest * max(1.0, head.alpha) * c.omega_in < 2.0**-20 * c.e_exp
    if little.all():
        return np.asarray(largest)
    return np.where(little, largest, np.where(land.visible, of_q + of_k, 0.0))
