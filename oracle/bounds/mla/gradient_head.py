"""What one head of mla may be off by on its way back, in either order: see `oracle.bounds.mla.gradient`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block, Rows
from oracle.bounds import computed, forward
from oracle.bounds.attention import output as attention
from oracle.bounds.attention.gradient import SCALE_ROUNDINGS, times
from oracle.bounds.attention.inner import FormErrors, Sizes, form_errors
from oracle.bounds.bounded import Bounded
from oracle.bounds.computed import Computed
from oracle.bounds.landscape import inflation
from oracle.case import Case
from oracle.contract.constants import Constants, accumulation_error, compound, constants
from oracle.contract.contract import Contract
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array, Format
from oracle.ops.mla import case as mla_case
from oracle.ops.mla import formula as mla
from oracle.ops.mla import gradient_case as gradients


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What a head adds to a gradient: upper bounds of its magnitude and of its error."""

    size: Float64Array
    wrong: Float64Array

    @property
    def reach(self) -> Float64Array:
        return np.asarray(self.size + self.wrong)

    def columns(self, start: int, stop: int | None) -> Share:
        return Share(self.size[:, start:stop], self.wrong[:, start:stop])

    def plus(self, other: Share) -> Share:
        return Share(self.size + other.size, self.wrong + other.wrong)

    @property
    def T(self) -> Share:
        return Share(self.size.T, self.wrong.T)


@dataclass(frozen=True, slots=True, eq=False)
class ExactHead:
    """One head's numbers and exact inner parts: dO [r, d_v], the forward block, z [r, d_c], magnitudes by name."""

    given: mla_case.Head
    do: Float64Array
    ahead: Block
    latent: Enclosure
    sizes: Mapping[str, Float64Array]


@dataclass(frozen=True, slots=True, eq=False)
class HeadErrors:
    """One head under one form: errors of dq [r, d_h] and [r, d_r], shares of the sums, what may overflow.

    dc_kv [n, d_c]: through the keys and through the values. broken [r, 1]: rows of dq. spoiled: whether the sums are.
    """

    dq_nope: Float64Array
    dq_pe: Float64Array
    dc_kv: tuple[Share, Share]
    dk_pe: Share
    dw_uk: Share
    dw_uv: Share
    broken: NDArray[np.bool_]
    spoiled: bool


def exact_head(case: Case, key: tuple[int, int], rows: Rows) -> ExactHead:
    ar = BallArithmetic()
    with ar.working():
        whole = np.array_equal(rows, gradients.all_rows(case))
        form = gradients.form_of(case, rows)
        one = gradients.of_all_rows(ar, case, key) if whole else gradients.gradients(ar, case, key, rows, form=form)
        x, inner = one.given, one.made.inner
        done = inner.forward
        if one.made.form == "absorbed":
            latent, out = done.out, mla.project(ar, done.out, one.values.w_uv)
        else:
            latent, out = ar.matmul(inner.p, one.values.c_kv, "accumulator"), done.out
        values = {n: getattr(done, n) for n in ("scores", "shift", "total", "lse")} | {"out": out}
        empty = np.asarray(~x.visible.any(axis=1))
        ahead = Block(key, rows, ar, values, empty, x.undefined, x.visible)
        names = ("p", "dp", "delta", "centred", "ds", "dx")
        sizes = {n: Enclosure(*ar.to_enclosure(getattr(inner, n))).upper_abs() for n in names}
        z = Enclosure(*(np.where(empty[:, None], 0.0, part) for part in ar.to_enclosure(latent)))
    return ExactHead(x, gradients.cotangent(case, key, rows)[0], ahead, z, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """The attention that an order reduces to: q [r, d], k [n, d], v [n, e], dO [r, e], O or z, how that is stored.

    lost: rows [r] whose computed operands, or some key's, may overflow.
    """

    q: Computed
    k: Computed
    v: Computed
    do: Computed
    out: Enclosure
    store: computed.Store
    lost: NDArray[np.bool_]


def _operands(e: ExactHead, form: Contract, c: Constants, fmt: Format) -> _Operands:
    x, up = e.given, computed.store_of(form.latent.up, fmt, form, c)
    c_kv, k_pe, q_pe, do = (computed.exact(a) for a in (x.c_kv, x.k_pe, x.q_pe, e.do))
    if form.latent.form == "materialised":
        k_nope = computed.projected(c_kv, x.w_uk, form, c, up)
        v = computed.projected(c_kv, x.w_uv, form, c, up)
        lost = computed.too_large(k_nope, up, c) | computed.too_large(v, up, c)
        heads = computed.store_of("input", fmt, form, c)
        q, k = computed.exact(x.q_nope).beside(q_pe), k_nope.beside(k_pe)
        # Of a key that a row does not see, too: 0 times infinity reaches every row.
        lost = np.full(len(x.q_nope), bool(lost.any()))
        return _Operands(q, k, v, do, e.ahead.part("out"), heads, lost)
    latent = computed.store_of(form.latent.summed, fmt, form, c)
    q_latent = computed.projected(computed.exact(x.q_nope), x.w_uk.T, form, c, up)
    dz = computed.projected(do, x.w_uv.T, form, c, latent)
    lost = computed.too_large(q_latent, up, c) | computed.too_large(dz, latent, c)
    return _Operands(q_latent.beside(q_pe), c_kv.beside(k_pe), c_kv, dz, e.latent, latent, lost)


def head_errors(case: Case, e: ExactHead, form: Contract, fmt: Format) -> HeadErrors:
    c, x = constants(form, fmt), e.given
    o = _operands(e, form, c, fmt)
    alpha = abs(mla_case.scale_float(case)) * (1 + 2.0**-50)
    f, made = _inner(e, o, alpha, form, c, fmt)
    batch, heads = case.arrays["q_nope"].shape[:2]
    dq, dk, dv = _attention_gradients(e, o, f, alpha, form, c, heads)
    up = computed.store_of(form.latent.up, fmt, form, c)
    d_h, d_c = x.w_uk.shape
    broken = f.broken | o.lost[:, None]
    spoiled = bool(broken.any())
    if form.latent.form == "materialised":
        dk_own, dv = _stored(dk.columns(0, d_h), up), _stored(dv, up)
        terms = heads * (d_h + len(x.w_uv))
        spoiled |= bool((dk.reach >= up.limit).any() or (dv.reach >= up.limit).any())
        return HeadErrors(
            dq.wrong[:, :d_h],
            dq.wrong[:, d_h:],
            (
                _product(dk_own, np.abs(x.w_uk), form, c, terms),
                _product(dv, np.abs(x.w_uv), form, c, terms),
            ),
            _stored(dk.columns(d_h, None), up),
            _product(dk_own.T, np.abs(x.c_kv), form, c, batch * len(x.c_kv)),
            _product(dv.T, np.abs(x.c_kv), form, c, batch * len(x.c_kv)),
            broken,
            spoiled,
        )
    too_large = (dq.columns(0, d_c).reach >= up.limit).any(axis=1, keepdims=True)
    dq_latent = _stored(dq.columns(0, d_c), up)
    z = Share(o.out.upper_abs(), np.where(e.ahead.empty[:, None], 0.0, made.wrong))
    rows = batch * case.arrays["q_nope"].shape[2]
    return HeadErrors(
        _product(dq_latent, np.abs(x.w_uk).T, form, c, d_c).wrong,
        dq.wrong[:, d_c:],
        (dk.columns(0, d_c), dv),
        dk.columns(d_c, None),
        _product(dq_latent.T, np.abs(x.q_nope), form, c, rows).T,
        _product(z.T, np.abs(e.do), form, c, rows).T,
        broken | too_large,
        spoiled or bool(too_large.any()),
    )


def _inner(
    e: ExactHead, o: _Operands, alpha: float, form: Contract, c: Constants, fmt: Format
) -> tuple[FormErrors, computed.Attended]:
    head = computed.HeadBlock(o.out, computed.head_of(e.ahead).land)
    w = computed.weighed(o.q, o.k, alpha, head.land, form, c)
    made = computed.attended(o.q, o.k, o.v, alpha, head, form, c, o.store)
    lse = forward.lse_bound(w.tilted, w.rho, head.land, form, c, c.compute)
    lse = lse * inflation(head.land, o.q.mid.shape[1])
    allowed = attention.Errors(
        c,
        head.land,
        w.eps,
        None,
        Bounded(made.wrong, np.broadcast_to(made.broken, made.wrong.shape)),
        Bounded(lse, made.broken),
        made.broken,
    )
    visible, slack = e.given.visible, 1 + 2.0**-52 * (o.do.mid.shape[1] + 2)
    magnitude = np.where(visible, (o.do.reach @ o.v.reach.T) * slack, 0.0)
    moved = np.where(visible, (o.do.reach @ o.v.wrong.T + o.do.wrong @ o.v.size.T) * slack, 0.0)
    delta, too_large = None, np.zeros((len(visible), 1), dtype=bool)
    if form.latent.form == "absorbed" and form.gradient.delta == "output":
        delta, too_large = _delta_wrong(e, o, made.wrong, form, c, fmt)
    sizes = Sizes(
        o.do.reach,
        o.v.reach,
        o.out.upper_abs(),
        magnitude,
        None,
        visible,
        None,
        fmt,
        None,
        alpha,
        **e.sizes,
        dp_wrong=moved,
        delta_wrong=delta,
    )
    f = form_errors(sizes, allowed, form)
    return replace(f, broken=f.broken | too_large), made


def _delta_wrong(
    e: ExactHead, o: _Operands, wrong: Float64Array, form: Contract, c: Constants, fmt: Format
) -> tuple[Float64Array, NDArray[np.bool_]]:
    """[r, 1] each: the error of D taken from O = W_UV z, or from z and dz; rows whose O may overflow."""
    empty = e.ahead.empty[:, None]
    z = Computed(
        o.out.hi + o.out.lo, o.out.rad + 2.0**-52 * np.abs(o.out.hi), np.where(empty, 0.0, wrong), o.out.upper_abs()
    )
    store = computed.store_of("input", fmt, form, c)
    out = computed.projected(z, e.given.w_uv, form, c, store)
    d_v, d_c = e.given.w_uv.shape
    of_out = np.abs(e.do) * (out.wrong + c.g(d_v) * out.reach)
    of_latent = o.do.size * z.wrong + o.do.wrong * z.reach + c.g(d_c) * o.do.reach * z.reach
    sums = [np.where(np.isnan(a), np.inf, a).sum(axis=1, keepdims=True) for a in (of_out, of_latent)]
    wrong = (np.maximum(*sums) + (d_v + d_c) * c.w) * (1 + 2.0**-52 * (d_v + d_c + 8))
    return np.asarray(wrong), computed.too_large(out, store, c)[:, None] & ~empty


def _attention_gradients(
    e: ExactHead, o: _Operands, f: FormErrors, alpha: float, form: Contract, c: Constants, heads: int
) -> tuple[Share, Share, Share]:
    """Shares of dq [r, d], dk [n, d] and dv [n, e] of the attention of the operands, unstored."""
    rows, n = f.dx.shape
    p, dx = e.sizes["p"], e.sizes["dx"]
    # The heads of an absorbed kernel share keys and values, which are one array: all rows of both may be one long sum.
    terms = 2 * rows * heads if form.latent.form == "absorbed" else rows
    over_keys, over_rows = accumulation_error(form, c, n), accumulation_error(form, c, terms)
    near = c.omega_in + c.omega_v

    def summed(size: Float64Array, wrong: Float64Array, other: Computed, chain: float, factor: float) -> Share:
        error = times(wrong, other.reach) + times(size, other.wrong)
        error = error + chain * times(size + wrong, other.reach) + len(other.mid) * c.w_acc
        beside = 2 * near * (size + wrong).sum(axis=1, keepdims=True)
        return Share(times(size, other.size) * factor, (error + beside) * factor)

    def scaled(x: Share) -> Share:
        return Share(x.size, x.wrong + SCALE_ROUNDINGS * (c.u * x.reach + (c.w if form.arithmetic.flush else 0.0)))

    dq = scaled(summed(dx, f.dx, o.k, compound(over_keys, c.u_k), alpha))
    dk = scaled(summed(dx.T, f.dx.T, o.q, compound(over_rows, c.u_q), alpha))
    return dq, dk, summed(p.T, f.cast.T, o.do, compound(over_rows, c.u_v), 1.0)


def _stored(x: Share, store: computed.Store) -> Share:
    return Share(x.size, x.wrong + store.unit * x.reach + store.omega)


def _product(x: Share, other: Float64Array, form: Contract, c: Constants, terms: int) -> Share:
    """x times exact numbers, in a chain of ``terms`` terms."""
    whole = times(x.reach, other)
    beside = x.reach.sum(axis=1, keepdims=True) + other.sum(axis=0)[None, :] + terms * c.omega_v
    error = times(x.wrong, other) + computed.product_error(form, c, terms) * whole + 2 * terms * c.w
    return Share(times(x.size, other), error + c.omega_v * beside)
