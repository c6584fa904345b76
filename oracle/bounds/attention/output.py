"""G1 for attention forward: the derived bound of O and L under a contract, one formula for naive and tiled kernels.

    |dO| <= E + H (|O| + E) + omega_o,   E = W + kP Z + U        (terms: `oracle.bounds.forward`)

Score error, with A_j = alpha sum |q||k_j|: the dot product's chain, roundings of the scale and of stored operands
(which follow A, not S), stored scores (which follow |S|), soft cap, bias. Sums over visible keys; a row without any has
no bound. A sink is one more key, of value 0, whose score has the error of its own roundings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds import forward
from oracle.bounds.attention.head import Head, numbers
from oracle.bounds.attention.overflow import drift, rows_may_overflow
from oracle.bounds.attention.scores import score_error
from oracle.bounds.bounded import Bounded
from oracle.bounds.landscape import Landscape, inflation, landscape
from oracle.bounds.spread import Values, spread, values_of
from oracle.case import Case
from oracle.contract.constants import Constants, compound, constants, dot_error
from oracle.contract.contract import Contract, GradientClaims
from oracle.enclosure import Enclosure
from oracle.formats import FORMATS, Float64Array, Format

# Pairs of queries and keys that are worked on at a time, and rows at least.
PAIRS, ROWS = 2**17, 16


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form, or of a stack's; see `oracle.bounds.table.Bounds`."""
    whole = numbers(case, block)
    observed = formats.get("out", whole.input_format), formats.get("lse", FORMATS["fp32"])
    parts = []
    with np.errstate(all="ignore"):
        values, plans = values_of(whole.v, block.part("out").hi, magnitude=whole.v_magnitude), _plans(whole, forms)
        for head, piece in _pieces(whole, block):
            weighed = weigh(head, piece, plans, observed[1])
            outputs = _outputs(head, values, piece, weighed, forms, observed[0])
            parts.append([{"out": out, "lse": f.lse} for out, f in zip(outputs, weighed.forms, strict=True)])
    return [{name: _stacked([part[name] for part in rows]) for name in rows[0]} for rows in zip(*parts, strict=True)]


def _pieces(head: Head, block: Block) -> Iterator[tuple[Head, Block]]:
    """A few rows at a time."""
    count, step = head.q.shape[-2], max(ROWS, PAIRS // max(1, head.k.shape[-2]))
    if count <= step:
        yield head, block
        return
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield head.of_rows(slice(start, stop)), block.between(start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """What one form allows in one block: constants, errors of scores (eps) [r, n], of O and L.

    sink_rho [r, 1]: error of a sink's weight. broken [r, 1]: rows in which an intermediate may overflow.
    """

    constants: Constants
    land: Landscape
    eps: Float64Array
    sink_rho: Float64Array | None
    out: Bounded
    lse: Bounded
    broken: NDArray[np.bool_]


def errors(head: Head, block: Block, forms: Sequence[Contract], observed: tuple[Format, Format]) -> list[Errors]:
    """One per form, for a block whose rows are those of ``head``; observed formats of O and L."""
    # Forms of gradients may do the same forwards.
    ahead = [replace(form, label="", gradient=GradientClaims()) for form in forms]
    distinct = list(dict.fromkeys(ahead))
    made = weigh(head, block, _plans(head, distinct), observed[1])
    values = values_of(head.v, block.part("out").hi, magnitude=head.v_magnitude)
    outputs = _outputs(head, values, block, made, distinct, observed[0])
    found = {
        form: Errors(f.constants, made.land, f.group.eps, f.sink_rho if head.has_sink else None, out, f.lse, f.broken)
        for form, f, out in zip(distinct, made.forms, outputs, strict=True)
    }
    return [found[form] for form in ahead]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Forms whose scores err alike, and whose weights do but for an error that all weights share.

    eps, exponent, rho [r, n]: errors of scores, exponents and weights. tilted: the weights without what a form of the
    group has more.
    """

    eps: Float64Array
    exponent: Float64Array
    rho: Float64Array
    even: float
    tilted: forward.Tilted


@dataclass(frozen=True, slots=True, eq=False)
class FormRows:
    """What one form allows in some rows: weights, sweeps apart, L, rows [r, 1] in which something may overflow."""

    constants: Constants
    group: Group
    tilted: forward.Tilted
    apart: Float64Array | float
    lse: Bounded
    broken: NDArray[np.bool_]

    @property
    def sink_rho(self) -> Float64Array:
        """[r, 1]: of the last key's weight."""
        return self.group.rho[..., -1:] + self.tilted.even


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """Some rows of a head as all forms weigh them."""

    land: Landscape
    groups: list[Group]
    forms: list[FormRows]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The form at a place in the list of them, with its constants and the error that all weights share.

    Equal keys: equal errors of scores, of exponents, and of weights but for the shared one.
    """

    place: int
    form: Contract
    constants: Constants
    even: float
    of_scores: Hashable
    of_exponent: Hashable
    of_group: Hashable


def _plans(head: Head, forms: Sequence[Contract]) -> list[Plan]:
    """The least shared error first."""
    made = []
    for place, form in enumerate(forms):
        c = constants(form, head.input_format)
        # All that `score_error` reads of a contract.
        of_products = (dot_error(form, c, head.q.shape[-1]), c.u, c.w, c.u_q, c.u_k, c.omega_in)
        scores = (*of_products, form.scores.stores, c.u_S, c.omega_S, c.e_exp, c.e_tanh, c.e_tanh_abs)
        exponent = (scores, c.u_D, c.omega_D)
        group = (exponent, c.e_log, c.e_ln, form.sums.splits > 1)
        even = forward.even_weight_error(head.k.shape[-2], form, c)
        made.append(Plan(place, form, c, even, scores, exponent, group))
    return sorted(made, key=lambda plan: plan.even)


def weigh(head: Head, block: Block, plans: Sequence[Plan], lse_format: Format) -> Weighed:
    """Errors of scores, weights and L for a block whose rows are those of ``head``."""
    dims = head.q.shape[-1]
    land = landscape(block)
    if head.common is not None:
        land = replace(
            land,
            size=land.seen(land.size + head.common),
            max_size=land.max_size + head.common,
            lse_size=land.lse_size + head.common,
        )
    raw = np.abs(head.q) @ head.k_magnitude.swapaxes(-1, -2)
    raw *= 1 + 2.0**-52 * (dims + 2)
    largest = land.seen(raw).max(axis=-1, keepdims=True, initial=0.0) * max(head.alpha, 1.0)
    p_total = land.p.sum(axis=-1, keepdims=True)
    of_scores: dict[Hashable, Float64Array] = {}
    of_exponent: dict[Hashable, Float64Array] = {}
    groups: dict[Hashable, Group] = {}
    made = {}
    grow = inflation(land, dims)
    for plan in plans:
        form, c, even = plan.form, plan.constants, plan.even
        if plan.of_scores not in of_scores:
            eps = score_error(head, raw, land, block, form, c)
            if head.has_sink:
                eps[..., -1] = (forward.SCORE_ROUNDINGS * c.u + c.u_S) * land.size[..., -1] + c.omega_S
            of_scores[plan.of_scores] = eps
        if plan.of_exponent not in of_exponent:
            of_exponent[plan.of_exponent] = forward.exponent_error(of_scores[plan.of_scores], land, c)
        if plan.of_group not in groups:
            eps, exponent = of_scores[plan.of_scores], of_exponent[plan.of_exponent]
            rho = forward.uneven_weight_error(eps, exponent, land, form, c)
            rho += even
            rho = land.seen(rho)
            if head.has_sink:
                rho += forward.sink_error(land, c)
            groups[plan.of_group] = Group(eps, exponent, rho, even, forward.tilt(rho, land))
        group = groups[plan.of_group]
        tilted = group.tilted.lifted(even - group.even, p_total)
        apart = forward.sweeps_apart(group.exponent, tilted, land, form, c)
        lse_size = land.lse_size
        if "whole_lse" in block.values:
            lse_size = block.part("lse").upper_abs()
            lse_bound = _bare_lse_bound(block, group.eps, form, c, lse_format) * grow
        else:
            lse_bound = forward.lse_bound(tilted, group.rho, land, form, c, lse_format) * grow
        tilted = replace(tilted, drift=drift(group.eps, land, form, c))
        broken = rows_may_overflow(head, largest, group.eps, land, form, c, drift=tilted.drift)
        lse = Bounded(lse_bound, broken | (lse_size + lse_bound >= lse_format.overflow_threshold))
        made[plan.place] = FormRows(c, group, tilted, apart, lse, broken)
    return Weighed(land, list(groups.values()), [made[place] for place in range(len(plans))])


def _outputs(
    head: Head,
    values: Values,
    block: Block,
    weighed: Weighed,
    forms: Sequence[Contract],
    out_format: Format,
) -> list[Bounded]:
    """Bounds of O [r, Dv], one per form."""
    out, land = block.part("out"), weighed.land
    weights = [group.tilted.moved for group in weighed.groups]
    lifted = any(f.tilted.even for f in weighed.forms)
    found = spread(values, out, [*weights, land.p] if lifted else weights, land.visible)
    p_size = found.magnitudes[-1] if lifted else land.p @ values.magnitude
    grow = inflation(land, head.q.shape[-1])
    # Where sums of V overflow float64 itself nothing can be computed, and nothing is promised.
    endless = ~np.isfinite(4 * values.total)[..., None, :]
    results, size_of_out = [], out.upper_abs()
    for form, made in zip(forms, weighed.forms, strict=True):
        c, tilted, broken = made.constants, made.tilted, made.broken
        at = next(g for g, group in enumerate(weighed.groups) if group is made.group)
        k_p = forward.cast_error(land, form, c)
        if head.descaled:
            # V is multiplied by its factor, or the output is.
            k_p = compound(k_p, c.u)
        distance, size = found.weighted[at], found.magnitudes[at] + p_size
        if tilted.even:
            distance = exp(tilted.even) * distance + expm1(tilted.even) * found.weighted[-1]
            size = exp(tilted.even) * size
        inner = forward.weights_part(tilted, distance, found.farthest)
        inner = inner + k_p * forward.weights_part(tilted, size, found.largest)
        inner = inner + forward.underflow_part(tilted, land, found, form, c) + c.omega_v * (1 + k_p)
        stored = forward.with_output(c, out_format)
        out_bound = forward.out_bound(inner, out, land, form, stored, apart=made.apart) * grow
        out_bound = np.where(np.isnan(out_bound) & (broken | endless), np.inf, out_bound)
        too_large = size_of_out + out_bound >= out_format.overflow_threshold
        if form.output.saturate:
            beyond = size_of_out + out_bound - out_format.max_finite
            out_bound, too_large = np.maximum(out_bound, beyond), np.zeros_like(too_large)
        results.append(Bounded(out_bound, broken | too_large))
    return results


def _stacked(parts: list[Bounded]) -> Bounded:
    if len(parts) == 1:
        return parts[0]
    bound, may_overflow = ([getattr(p, name) for p in parts] for name in ("bound", "may_overflow"))
    return Bounded(np.concatenate(bound, axis=-2), np.concatenate(may_overflow, axis=-2))


def _bare_lse_bound(block: Block, eps: Float64Array, contract: Contract, c: Constants, fmt: Format) -> Float64Array:
    """dL [r, 1] of an L that leaves the sink out: the bound without a sink, about the maximum of the real keys."""
    scores, lse = block.part("scores"), block.part("lse")
    top = np.max(scores.hi, axis=-1, keepdims=True, where=block.visible_keys(), initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(lse.hi - top)
    zero = np.zeros_like(top)
    patches = {
        "scores": scores,
        "lse": lse,
        "shift": Enclosure(top, zero, zero),
        "total": Enclosure(total, zero, total * (np.expm1(lse.rad + np.abs(lse.lo)) + 2.0**-49)),
    }
    bare = landscape(replace(block, values={}, patches=patches))
    eps = eps[..., :-1]
    rho = forward.weight_error(eps, forward.exponent_error(eps, bare, c), bare, contract, c)
    return forward.lse_bound(forward.tilt(rho, bare), rho, bare, contract, c, fmt)
