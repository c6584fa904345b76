"""G1 for attention forward: the derived bound of O and L under a contract, one formula for naive and tiled kernels.

    |dO| <= E + H (|O| + E) + omega_o,   E = W + kP Z + U        (terms: `oracle.bounds.forward`)

Score error, with A_j = alpha sum |q||k_j|: the dot product's chain, roundings of the scale and of stored operands
(which follow A, not S), stored scores (which follow |S|), soft cap, bias. Sums over visible keys; a row without any has
no bound. A sink is one more key, of value 0, whose score has the error of its own roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block, Rows
from oracle.bounds import forward
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.constants import Constants, accumulation_error, compound, constants, dot_error, row_sum_error
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format, format_named, format_of
from oracle.ops.attention import case as attention_case
from oracle.ops.attention.case import chosen, query_positions, scale_float

# Entries of the [r, n] arrays that are worked on at a time.
CACHED = 2**15


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form; see `oracle.bounds.table.Bounds`."""
    whole = numbers(case, block)
    observed = formats.get("out", whole.input_format), formats.get("lse", FORMATS["fp32"])
    # A few rows at a time keep the [r, n] arrays in cache.
    step = max(1, CACHED // max(1, len(whole.k)))
    parts = []
    for start in range(0, max(1, len(whole.q)), step):
        rows = slice(start, min(start + step, len(whole.q)))
        piece = block if len(whole.q) <= step else block.between(rows.start, rows.stop)
        with np.errstate(all="ignore"):
            parts.append(errors(whole.of_rows(rows), piece, forms, observed))
    return [
        {"out": _stacked([part[index].out for part in parts]), "lse": _stacked([part[index].lse for part in parts])}
        for index in range(len(forms))
    ]


def numbers(case: Case, block: Block) -> Head:
    """What the bounds read of the case of one block of attention."""
    x = attention_case.head(case, block.key, block.rows)
    (bias, common), k, v = _offsets(case, x, block.rows), x.k, x.v
    if x.sink is not None:
        # The sink's key: its raw score is 0, its value too.
        k, v = (np.vstack([a, np.zeros((1, a.shape[1]))]) for a in (k, v))
        bias = None if bias is None else np.pad(bias, [(0, 0), (0, 1)])
    cap = case.options.get("softcap")
    return Head(
        x.q,
        k,
        v,
        np.abs(k),
        np.abs(v),
        bias,
        abs(scale_float(case)) * (1 + 2.0**-50),
        format_of(case.arrays["q"]),
        None if cap is None else float(cap),
        _capped_last(case),
        x.sink is not None,
        common,
        any(case.options.get(name) is not None for name in attention_case.DESCALES),
        (x.bias is not None) + (x.slope is not None),
    )


def _capped_last(case: Case) -> bool:
    return case.options.get("softcap") is not None and chosen(case, "softcap_order") == "after_mask"


def _offsets(case: Case, x: attention_case.Head, rows: Rows) -> tuple[Float64Array | None, Float64Array | None]:
    """(|additive mask| + |ALiBi| [r, n], how much larger a whole row of scores may be [r, 1]); None: neither.

    Roundings of a bias follow the first. Kernels that add slope j instead of -slope |distance| give the same O where
    no key comes later than the query, from scores that all differ by slope times the query's position, unless they meet
    a sink or a cap afterwards: where the case does not say which it is, both are covered.
    """
    if x.slope is None or x.reach is None:
        return None if x.bias is None else np.abs(x.bias), None
    reach, common = np.abs(x.reach), None
    if "alibi_bias" not in case.options and x.sink is None and not _capped_last(case):
        at, j = query_positions(case, rows), np.arange(reach.shape[1])[None, :]
        earlier = ~(x.visible & (j > at)).any(axis=1, keepdims=True)
        reach = np.where(earlier, np.maximum(reach, j), reach)
        common = abs(x.slope) * np.where(earlier, np.abs(at), 0).astype(np.float64)
    alibi = abs(x.slope) * reach
    return np.asarray(alibi if x.bias is None else alibi + np.abs(x.bias)), common


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One head's numbers: q [r, D], k [n, D], v [n, Dv], the magnitudes of the last two, |bias| [r, n] or None.

    With a sink the last key is its. common [r, 1] or None: how much larger a kernel's scores may be, a whole row alike.
    descaled: whether q, k, v are stored numbers times factors. joins: how many additive terms there are.
    """

    q: Float64Array
    k: Float64Array
    v: Float64Array
    k_magnitude: Float64Array
    v_magnitude: Float64Array
    bias: Float64Array | None
    alpha: float
    input_format: Format
    softcap: float | None = None
    cap_last: bool = False
    has_sink: bool = False
    common: Float64Array | None = None
    descaled: bool = False
    joins: int = 0

    def of_rows(self, rows: slice) -> Head:
        bias, common = (None if a is None else a[rows] for a in (self.bias, self.common))
        return replace(self, q=self.q[rows], bias=bias, common=common)


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """What one form allows in one block: constants, errors of scores (eps) and of weights (rho) [r, n], of O and L.

    broken [r, 1]: rows in which an intermediate may overflow.
    """

    constants: Constants
    land: forward.Landscape
    eps: Float64Array
    rho: Float64Array
    out: Bounded
    lse: Bounded
    broken: NDArray[np.bool_]


def errors(head: Head, block: Block, forms: Sequence[Contract], observed: tuple[Format, Format]) -> list[Errors]:
    """One per form, for a block whose rows are those of ``head``; observed formats of O and L."""
    out_format, lse_format = observed
    dims = head.q.shape[1]
    land = forward.landscape(block)
    if head.common is not None:
        land = replace(
            land,
            size=np.where(land.visible, land.size + head.common, 0.0),
            max_size=land.max_size + head.common,
            lse_size=land.lse_size + head.common,
        )
    raw = (np.abs(head.q) @ head.k_magnitude.T) * (1 + 2.0**-52 * (dims + 2))
    tilted, made = [], []
    for form in forms:
        c = constants(form, head.input_format)
        eps = _score_error(head, raw, land, block, form, c)
        if head.has_sink:
            eps[:, -1] = (forward.SCORE_ROUNDINGS * c.u + c.u_S) * land.size[:, -1] + c.omega_S
        rho = forward.weight_error(eps, land, form, c)
        if head.has_sink:
            rho = rho + forward.sink_error(land, c)
        made.append((c, eps, rho))
        tilted.append(forward.tilt(rho, land))
    out = block.part("out")
    found = forward.spread(head.v, out, [t.moved for t in tilted], land.visible)
    grow = forward.inflation(land, dims)
    results = []
    for form, (c, eps, rho), t, weighted in zip(forms, made, tilted, found.weighted, strict=True):
        k_p = forward.cast_error(land, form, c)
        if head.descaled:
            # V is multiplied by its factor, or the output is.
            k_p = compound(k_p, c.u)
        inner = forward.weights_part(t, weighted, found.farthest)
        inner = inner + k_p * forward.cast_part(t, head.v_magnitude, found.largest)
        inner = inner + forward.underflow_part(t, land, found, form, c) + c.omega_v * (1 + k_p)
        apart = forward.sweeps_apart(eps, rho, land, form, c)
        out_bound = forward.out_bound(inner, out, land, form, forward.with_output(c, out_format), apart=apart) * grow
        lse_size = land.lse_size
        if "whole_lse" in block.values:
            lse_size = block.part("lse").upper_abs()
            lse_bound = _bare_lse_bound(block, eps, form, c, lse_format) * grow
        else:
            lse_bound = forward.lse_bound(t, rho, land, form, c, lse_format) * grow
        broken = _rows_may_overflow(head, raw, eps, land, form, c)
        # Where sums of V overflow float64 itself nothing can be computed, and nothing is promised.
        lost = broken | ~np.isfinite(4 * head.v_magnitude.sum(axis=0))
        out_bound = np.where(np.isnan(out_bound) & lost, np.inf, out_bound)
        too_large = out.upper_abs() + out_bound >= out_format.overflow_threshold
        if form.saturate:
            beyond = out.upper_abs() + out_bound - out_format.max_finite
            out_bound, too_large = np.maximum(out_bound, beyond), np.zeros_like(too_large)
        lse_too_large = lse_size + lse_bound >= lse_format.overflow_threshold
        whole = Bounded(out_bound, broken | too_large)
        results.append(Errors(c, land, eps, rho, whole, Bounded(lse_bound, broken | lse_too_large), broken))
    return results


def _stacked(parts: list[Bounded]) -> Bounded:
    if len(parts) == 1:
        return parts[0]
    return Bounded(np.concatenate([p.bound for p in parts]), np.concatenate([p.may_overflow for p in parts]))


def _score_error(
    head: Head, raw: Float64Array, land: forward.Landscape, block: Block, contract: Contract, c: Constants
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
    if contract.score_stores and head.joins > 1:
        eps = eps + c.u_S * (np.minimum(before[1], head.softcap) + bias + eps) + c.omega_S
    if contract.score_stores:
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
    if not contract.score_stores:
        return np.asarray(eps)
    # Raw and scaled scores are stored before the bias joins them: their roundings follow |S - bias|, which is at most
    # |S| + |bias|. The sum is stored once more.
    stores = contract.score_stores + joins
    before = size + bias
    eps = eps + np.expm1(stores * np.log1p(c.u_S)) * (before + eps) + stores * (1 + alpha) * c.omega_S
    return np.asarray(eps)


def _before_cap(head: Head, block: Block) -> tuple[Float64Array, Float64Array]:
    """Lower and upper bound of |x| for what the soft cap is applied to [r, n]; 0 for the sink, which is not capped."""
    given = block.part("uncapped")
    both = np.maximum(np.abs(given.hi) - np.abs(given.lo) - given.rad, 0.0), given.upper_abs()
    low, high = (np.pad(size, [(0, 0), (0, 1)]) if head.has_sink else size for size in both)
    return low, high


def _capped(
    eps: Float64Array, head: Head, before: tuple[Float64Array, Float64Array], contract: Contract, c: Constants
) -> Float64Array:
    """eps of c tanh(x / c) from that of x, where |x| lies in ``before``."""
    assert head.softcap is not None
    cap, (low, high) = head.softcap, before
    if contract.score_stores:
        # The quotient is stored too.
        eps = eps + c.u_S * (high + eps) + cap * c.omega_S
    moved = cap * tanh_moves(low / cap, high / cap, eps / cap)
    after = np.minimum(cap * np.tanh(high / cap) * (1 + 2.0**-48) + moved, cap)
    # tanh, the product with the cap (the cap and log2 e as constants, their product), two sums with biases.
    eps = moved + compound(c.e_tanh, c.g(6)) * after + cap * (1 + c.g(6)) * (c.e_tanh_abs + 2 * c.w)
    if contract.score_stores:
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


def _bare_lse_bound(block: Block, eps: Float64Array, contract: Contract, c: Constants, fmt: Format) -> Float64Array:
    """dL [r, 1] of an L that leaves the sink out: the bound without a sink, about the maximum of the real keys."""
    scores, lse = block.part("scores"), block.part("lse")
    top = np.max(scores.hi, axis=1, keepdims=True, where=block.visible_keys(), initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(lse.hi - top)
    zero = np.zeros_like(top)
    patches = {
        "scores": scores,
        "lse": lse,
        "shift": Enclosure(top, zero, zero),
        "total": Enclosure(total, zero, total * (np.expm1(lse.rad + np.abs(lse.lo)) + 2.0**-49)),
    }
    bare = forward.landscape(replace(block, values={}, patches=patches))
    rho = forward.weight_error(eps[:, :-1], bare, contract, c)
    return forward.lse_bound(forward.tilt(rho, bare), rho, bare, contract, c, fmt)


def _operand_sums(head: Head, land: forward.Landscape, c: Constants) -> Float64Array | float:
    """sum |q| + sum |k_j|: over all keys where its largest value does not matter, else key by key [r, n]."""
    of_q, of_k = np.abs(head.q).sum(axis=1, keepdims=True), head.k_magnitude.sum(axis=1)
    largest = float(of_q.max(initial=0.0) + of_k.max(initial=0.0))
    if largest * max(1.0, head.alpha) * c.omega_in < 2.0**-20 * c.e_exp:
        return largest
    return np.where(land.visible, of_q + of_k[None, :], 0.0)


def _rows_may_overflow(
    head: Head, raw: Float64Array, eps: Float64Array, land: forward.Landscape, contract: Contract, c: Constants
) -> NDArray[np.bool_]:
    """[r, 1]: rows in which an intermediate of this contract may legally overflow."""
    # Half the range: factors such as log2 e, and partial sums larger than their total.
    limit = c.compute.max_finite / 2
    largest = np.where(land.visible, raw, 0.0).max(axis=1, keepdims=True, initial=0.0) * max(head.alpha, 1.0)
    # In base two the maximum itself leaves the range when all of a row is masked with the lowest finite number; below a
    # sensible maximum such keys do no harm.
    broken = (largest >= limit) | (land.max_size >= limit)
    if head.has_sink:
        broken |= forward.joined(land).top_size >= limit
    # The output before its division: l times larger, and more under a maximum that lags.
    factor = np.exp(contract.lag) / land.total_inverse
    sums_limit, grown = limit, 1.0
    if contract.accumulator is not None:
        sums_limit = min(limit, _limit(contract.accumulator))
        grown = 1 + accumulation_error(contract, c, land.keys)
    weights, before = np.where(land.visible, land.p, 0.0), grown * (1.0 if contract.normalised_p else factor)
    if contract.splits > 1:
        # The maximum is that of a part, whichever keys it holds: no weight need be less than 1.
        total = np.maximum(land.visible.sum(axis=1, keepdims=True), 1)
        weights, before = land.visible / total, grown * np.exp(contract.lag) * total
    elif head.has_sink:
        # A sink that joins at the end leaves maximum and sums as they are without it.
        there = forward.joined(land)
        fall = np.minimum(land.scores + land.scores_rad + land.slack - there.top, 1.0)
        weights = np.where(land.visible & (np.arange(land.keys) < land.keys - 1), np.exp(fall), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1.0)
        before = grown * (1.0 if contract.normalised_p else np.exp(contract.lag) * total)
    most = float(head.v_magnitude.max(initial=0.0))
    if not np.all(before * most < sums_limit):
        sums = (weights @ head.v_magnitude) * before
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
