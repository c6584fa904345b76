"""G1 for the gradients of mla's core, materialised: those of attention with computed k and v, carried through W.

k^ = k + dk and v^ = v + dv (`oracle.bounds.computed`) enter the scores' eps, dP = dO v^ by |dO| dv, and dQ = dS k^ by
|dS| dk; the rest of dS is `oracle.bounds.attention_backward`. A gradient g^ = g + e of what W made of c gives

    dc: sum_h (|W_UK| e_k + |W_UV| e_v) + c_K sum_h (|W_UK| (|dk^C| + e_k) + |W_UV| (|dv| + e_v)) + 2 K w,
    dW: sum_b e^T |c| + c_K sum_b (|g| + e)^T |c| + 2 K w,     K = H (d_h + d_v) of dc, B n of dW

where heads' shares may be stored in the output's format before they are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.bounds import attention, computed, forward
from oracle.bounds.attention_backward import SCALE_ROUNDINGS, Sizes, form_errors, times
from oracle.bounds.contract import Constants, Contract, accumulation_error, constants
from oracle.bounds.table import Bounded
from oracle.case import Case
from oracle.enclosure import Block, Enclosure, Rows
from oracle.formats import Float64Array, Format, format_of
from oracle.ops import mla_backward_case as gradients
from oracle.ops import mla_case


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict per form with the outputs of the block's kind; see `oracle.bounds.table.Bounds`."""
    fmt = format_of(case.arrays["q_nope"])
    rows = block.rows if block.key[0] == gradients.DQ else gradients.all_rows(case)
    with np.errstate(all="ignore"):
        keys = gradients.heads_of(case, block.key)
        whole = np.array_equal(rows, gradients.all_rows(case))
        asked = gradients.Asked(case.digest(), case)
        heads = [_whole(asked, key) if whole else _exact(case, key, rows) for key in keys]
        made = []
        for form in forms:
            parts = [
                _whole_head(asked, key, form, fmt) if whole else _head(case, head, form, fmt)
                for key, head in zip(keys, heads, strict=True)
            ]
            found = _sums(case, block, heads, parts, form, formats, fmt)
            made.append({n: b for n, b in found.items() if n in formats or not formats})
    return made


@dataclass(frozen=True, slots=True, eq=False)
class _Exact:
    """One head's numbers and exact inner parts: dO [r, d_v], the forward block, magnitudes by name."""

    given: mla_case.Head
    do: Float64Array
    ahead: Block
    sizes: Mapping[str, Float64Array]


# Every block of a head needs all of it: the last few are remembered.
@lru_cache(maxsize=16)
def _whole(asked: gradients.Asked, key: tuple[int, int]) -> _Exact:
    return _exact(asked.case, key, gradients.all_rows(asked.case))


@lru_cache(maxsize=128)
def _whole_head(asked: gradients.Asked, key: tuple[int, int], form: Contract, fmt: Format) -> _Head:
    with np.errstate(all="ignore"):
        return _head(asked.case, _whole(asked, key), form, fmt)


def _exact(case: Case, key: tuple[int, int], rows: Rows) -> _Exact:
    ar = BallArithmetic()
    with ar.working():
        whole = np.array_equal(rows, gradients.all_rows(case))
        made, x, _ = gradients.of_all_rows(ar, case, key) if whole else gradients.gradients(ar, case, key, rows)
        inner = made.inner
        done = inner.forward
        values = {n: getattr(done, n) for n in ("scores", "shift", "total", "out", "lse")}
        empty = np.asarray(~x.visible.any(axis=1))
        ahead = Block(key, rows, ar, values, empty, x.undefined, x.visible)
        sizes = {n: Enclosure(*ar.to_enclosure(getattr(inner, n))).upper_abs() for n in ("p", "dp", "delta", "centred")}
        sizes |= {n: Enclosure(*ar.to_enclosure(getattr(inner, n))).upper_abs() for n in ("ds", "dx")}
    return _Exact(x, np.abs(gradients.cotangent(case, key, rows)[0]), ahead, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """One head under one form: dq [r, d], dk [n, d], dv [n, d_v] as sizes and errors; rows or all that may overflow."""

    dq: tuple[Float64Array, Float64Array]
    dk: tuple[Float64Array, Float64Array]
    dv: tuple[Float64Array, Float64Array]
    broken: NDArray[np.bool_]


def _head(case: Case, e: _Exact, form: Contract, fmt: Format) -> _Head:
    c, x = constants(form, fmt), e.given
    up, heads = computed.store_of(form.up, fmt, form, c), computed.store_of("input", fmt, form, c)
    c_kv = computed.exact(x.c_kv)
    k_nope = computed.projected(c_kv, x.w_uk, form, c, up)
    v = computed.projected(c_kv, x.w_uv, form, c, up)
    q = computed.exact(x.q_nope).beside(computed.exact(x.q_pe))
    k = k_nope.beside(computed.exact(x.k_pe))
    alpha = abs(mla_case.scale_float(case)) * (1 + 2.0**-50)
    head = computed.head_of(e.ahead)
    w = computed.weighed(q, k, alpha, head.land, form, c)
    made = computed.attended(q, k, v, alpha, head, form, c, heads)
    wide = c.compute
    lse = forward.lse_bound(w.tilted, w.rho, head.land, form, c, wide) * forward.inflation(head.land, q.mid.shape[1])
    allowed = attention.Errors(
        c,
        head.land,
        w.eps,
        w.rho,
        Bounded(made.wrong, np.broadcast_to(made.broken, made.wrong.shape)),
        Bounded(lse, made.broken),
        made.broken,
    )
    slack = 1 + 2.0**-52 * (e.do.shape[1] + 2)
    magnitude = np.where(x.visible, (e.do @ v.reach.T) * slack, 0.0)
    dp_wrong = np.where(x.visible, (e.do @ v.wrong.T) * slack, 0.0)
    out = head.out.upper_abs()
    sizes = Sizes(e.do, v.reach, out, magnitude, None, x.visible, None, fmt, None, alpha, **e.sizes, dp_wrong=dp_wrong)
    f = form_errors(sizes, allowed, form)
    n, rows = x.visible.shape[1], len(e.do)
    # Sums over keys for dq, over queries for dk and dv.
    over_keys, over_rows = accumulation_error(form, c, n), accumulation_error(form, c, rows)
    p, dx = e.sizes["p"], e.sizes["dx"]
    dq_size = times(dx, k.size) * alpha
    dq = times(f.dx, k.reach) + times(dx, k.wrong)
    dq = (dq + _chain(over_keys, c.u_k) * times(dx + f.dx, k.reach)) * alpha + alpha * n * c.w_acc
    dq = dq + SCALE_ROUNDINGS * c.u * (dq_size + dq)
    q_size = q.size
    dk_size = times(dx.T, q_size) * alpha
    dk = (times(f.dx.T, q_size) + _chain(over_rows, c.u_q) * times((dx + f.dx).T, q_size)) * alpha
    dk = dk + alpha * rows * c.w_acc
    dk = dk + SCALE_ROUNDINGS * c.u * (dk_size + dk)
    dv_size = times(p.T, e.do)
    dv = times(f.cast.T, e.do) + _chain(over_rows, c.u_v) * times((p + f.cast).T, e.do) + rows * c.w_acc
    near = c.omega_in + c.omega_v
    dk = dk + 2 * alpha * near * (dx + f.dx).sum(axis=0)[:, None]
    dq = dq + 2 * alpha * near * (dx + f.dx).sum(axis=1, keepdims=True)
    dv = dv + 2 * near * (p + f.cast).sum(axis=0)[:, None]
    dk, dv = (a + up.unit * (size + a) + up.omega for a, size in ((dk, dk_size), (dv, dv_size)))
    lost = computed.too_large(k_nope, up, c) | computed.too_large(v, up, c)
    broken = f.broken | (x.visible & lost).any(axis=1, keepdims=True)
    return _Head((dq_size, dq), (dk_size, dk), (dv_size, dv), broken)


def _chain(chain: float, unit: float) -> float:
    return (1 + unit) * (1 + chain) - 1


def _sums(
    case: Case,
    block: Block,
    heads: Sequence[_Exact],
    parts: Sequence[_Head],
    form: Contract,
    formats: Mapping[str, Format],
    fmt: Format,
) -> dict[str, Bounded]:
    c, d_h, kind = constants(form, fmt), case.arrays["w_uk"].shape[1], block.key[0]
    everything = np.array([[any(part.broken.any() for part in parts)]])
    if kind == gradients.DQ:
        wrong = parts[0].dq[1]
        pieces = {"dq_nope": wrong[:, :d_h], "dq_pe": wrong[:, d_h:]}
        return {n: _settled(block.part(n), b, parts[0].broken, c, formats.get(n, fmt)) for n, b in pieces.items()}
    found: dict[str, Float64Array] = {}
    if kind == gradients.DC:
        d_v = case.arrays["w_uv"].shape[1]
        found["dc_kv"] = _added(
            [_through(h.given, part, form, c, len(parts) * (d_h + d_v)) for h, part in zip(heads, parts, strict=True)],
            c,
        )
        found["dk_pe"] = _added([(part.dk[0][:, d_h:], part.dk[1][:, d_h:]) for part in parts], c)
    else:
        terms = len(parts) * len(heads[0].given.c_kv)
        shares = []
        for h, part in zip(heads, parts, strict=True):
            size, wrong = (a[:, :d_h] for a in part.dk) if kind == gradients.DUK else part.dv
            latents = np.abs(h.given.c_kv)
            shares.append(_product(size.T, wrong.T, latents, form, c, terms))
        found["dw_uk" if kind == gradients.DUK else "dw_uv"] = _added(shares, c)
    return {n: _settled(block.part(n), b[block.rows], everything, c, formats.get(n, fmt)) for n, b in found.items()}


def _through(
    x: mla_case.Head, part: _Head, form: Contract, c: Constants, terms: int
) -> tuple[Float64Array, Float64Array]:
    """Size and error of one head's share of dc [n, d_c]."""
    d_h = len(x.w_uk)
    of_k = _product(part.dk[0][:, :d_h], part.dk[1][:, :d_h], np.abs(x.w_uk), form, c, terms)
    of_v = _product(part.dv[0], part.dv[1], np.abs(x.w_uv), form, c, terms)
    return of_k[0] + of_v[0], of_k[1] + of_v[1]


def _product(
    size: Float64Array, wrong: Float64Array, other: Float64Array, form: Contract, c: Constants, terms: int
) -> tuple[Float64Array, Float64Array]:
    """Size and error of a b, b exact, in a chain of ``terms`` terms."""
    whole = times(size + wrong, other)
    beside = (size + wrong).sum(axis=1, keepdims=True) + other.sum(axis=0)[None, :] + terms * c.omega_v
    error = times(wrong, other) + computed.product_error(form, c, terms) * whole + 2 * terms * c.w
    return times(size, other), error + c.omega_v * beside


def _added(shares: Sequence[tuple[Float64Array, Float64Array]], c: Constants) -> Float64Array:
    """The error of a sum whose shares may be stored in the output's format first."""
    total = sum(b + (c.u_o * (size + b) + c.omega_o if len(shares) > 1 else 0.0) for size, b in shares)
    sizes = sum(size for size, _ in shares)
    return np.asarray(total + c.g(2 * len(shares)) * (sizes + total))


def _settled(exact: Enclosure, b: Float64Array, broken: NDArray[np.bool_], c: Constants, fmt: Format) -> Bounded:
    size = exact.upper_abs()
    unit, lost = max(c.u_o, fmt.unit_roundoff), max(c.omega_o, fmt.omega)
    if fmt.precision >= c.compute.precision:
        unit, lost = c.u, c.compute.omega
    bound = (b + unit * (size + b) + lost) * (1 + 2.0**-50 * (b.size + 512))
    return Bounded(np.asarray(bound), np.asarray(broken | (size + bound >= fmt.overflow_threshold)))
