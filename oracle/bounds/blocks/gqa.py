"""G1 for gqa_block: errors carried from the projections through rotation and attention to the output projection.

`oracle.bounds.computed` has the steps. With bO_h the bound of the stored output of head h,

    b = sum_h |W_O,h| bO_h + c_K sum_h |W_O,h| (|O_h| + bO_h) + K w,   |dy| <= b + u_o (|y| + b) + omega_o
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds import computed
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.constants import constants
from oracle.contract.contract import Contract, LatentClaims
from oracle.formats import Float64Array, Format, format_of
from oracle.ops.blocks.gqa_case import Sequence as OneSequence
from oracle.ops.blocks.gqa_case import head_block, sequence, sizes


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
        heads = [computed.head_of(head_block(block, h)) for h in range(sizes(case).heads)]
        for form in forms:
            # Forms that differ in the attention alone have the same operands.
            latent = LatentClaims(between=form.latent.between)
            common = Contract(arithmetic=form.arithmetic, rope=form.rope, latent=latent)
            if common not in made:
                made[common] = _operands(case, s, common, input_format)
            results.append({"out": _bound(case, block, s, heads, made[common], form, input_format, observed)})
    return results


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """Rotated q per head, rotated k and v per KV head, and rows [r, 1] in which one of them may overflow."""

    q: list[computed.Computed]
    k: list[computed.Computed]
    v: list[computed.Computed]
    broken: NDArray[np.bool_]


def _operands(case: Case, s: OneSequence, form: Contract, input_format: Format) -> _Operands:
    n, c, rows = sizes(case), constants(form, input_format), np.asarray(s.rows)
    between = computed.store_of(form.latent.between, input_format, form, c)
    turning = computed.turning_of(form.rope.rotate, input_format, form, c, between)
    x = computed.exact(s.x)
    q = computed.projected(x.rows(rows), s.weights["w_q"], form, c, between)
    k, v = (computed.projected(x, s.weights[name], form, c, between) for name in ("w_k", "w_v"))
    own, others = computed.Table(s.cos[rows], s.sin[rows]), computed.Table(s.cos, s.sin)

    def of_head(a: computed.Computed, head: int) -> computed.Computed:
        return a.columns(head * n.dim, (head + 1) * n.dim)

    turned_q = [computed.turned(of_head(q, h), own, turning) for h in range(n.heads)]
    turned_k = [computed.turned(of_head(k, g), others, turning) for g in range(n.kv_heads)]
    lost_q = np.any([computed.too_large(a, between, c) for a in (q, *turned_q)], axis=0)
    lost_k = np.any([computed.too_large(a, between, c) for a in (k, v, *turned_k)], axis=0)
    broken = lost_q[:, None] | (s.visible & lost_k).any(axis=1, keepdims=True)
    return _Operands(turned_q, turned_k, [of_head(v, g) for g in range(n.kv_heads)], broken)


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
    n, c = sizes(case), constants(form, input_format)
    between = computed.store_of(form.latent.between, input_format, form, c)
    alpha = 1.0 / float(np.sqrt(n.dim)) * (1 + 2.0**-50)
    outs, wrongs, broken = [], [], given.broken
    for h, head in enumerate(heads):
        g = h // (n.heads // n.kv_heads)
        made = computed.attended(given.q[h], given.k[g], given.v[g], alpha, head, form, c, between)
        outs.append(head.out.upper_abs())
        wrongs.append(made.wrong)
        broken = broken | made.broken
    return output(np.hstack(outs), np.hstack(wrongs), s.weights["w_o"], block, form, input_format, observed, broken)


def output(
    out: Float64Array,
    wrong: Float64Array,
    w_o: Float64Array,
    block: Block,
    form: Contract,
    input_format: Format,
    observed: Format,
    broken: NDArray[np.bool_],
) -> Bounded:
    """The bound of y = O W_O^T from |O| and its error [r, K]; where a row is ``broken`` [r, 1] it may overflow."""
    c, terms, across = constants(form, input_format), w_o.shape[1], np.abs(w_o).T
    reach = (out + wrong) @ across
    beside = (out + wrong).sum(axis=1, keepdims=True) + across.sum(axis=0)[None, :] + terms * c.omega_v
    b = wrong @ across + computed.product_error(form, c, terms) * reach + 2 * terms * c.w + c.omega_v * beside
    size = block.part("out").upper_abs()
    omega = observed.smallest_normal if form.arithmetic.flush else observed.omega
    u_o, omega_o = observed.unit_roundoff, omega
    if form.output.stored_as is not None:
        u_o, omega_o = max(u_o, c.u_o), max(omega, c.omega_o)
    bound = (b + u_o * (size + b) + omega_o) * (1 + 2.0**-52 * (terms + 512))
    overflows = (size + bound >= observed.overflow_threshold) | (reach >= c.compute.max_finite / 2)
    return Bounded(bound, np.asarray(broken | overflows))
