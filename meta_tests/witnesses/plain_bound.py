"""The bound of attention once more: mpmath, loops over exact numbers, constants restated, from docs/bounds.md.

Shares nothing with `oracle.bounds` but the contract's fields. One head, one row, inputs [1, 1, S, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np

from meta_tests.witnesses.attention import added, exact, may_attend, position
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import Format

Number = Any


@dataclass(frozen=True)
class Units:
    """The numbers that a contract gives for an input format."""

    u: Number
    w: Number
    u_p: Number
    omega_p: Number
    u_s: Number
    omega_s: Number
    u_d: Number
    omega_d: Number
    u_o: Number
    omega_o: Number
    u_qk: Number
    omega_in: Number
    tanh: Number
    tanh_abs: Number
    precision: int

    def g(self, m: int) -> Number:
        return m * self.u / (1 - m * self.u)


def units(form: Contract, fmt: Format) -> Units:
    mp = mpmath.mpf
    precision, emin, smallest = (53, -1022, -1074) if form.arithmetic.compute == "fp64" else (24, -126, -150)
    u = mp(2) ** -precision
    stored = mp(2) ** -fmt.precision
    # Half the smallest subnormal; float64 holds all of its own only.
    omega = mp(2) ** max(fmt.emin - fmt.precision, -1074)
    cast = form.weights.cast_to is None and fmt.precision < precision
    return Units(
        u=u,
        w=mp(2) ** emin,
        u_p=stored if cast else mp(0),
        omega_p=omega if cast else mp(0),
        u_s=stored if form.scores.stores else mp(0),
        omega_s=omega if form.scores.stores else mp(0),
        u_d=stored if form.scores.shifted else mp(0),
        omega_d=omega if form.scores.shifted else mp(0),
        u_o=stored,
        omega_o=omega,
        u_qk=u if form.scores.prescale == "compute" else mp(0),
        omega_in=mp(2) ** smallest,
        tanh=4 * u if form.arithmetic.tanh is None else exact(form.arithmetic.tanh),
        tanh_abs=8 * u if form.arithmetic.tanh_abs is None else exact(form.arithmetic.tanh_abs),
        precision=precision,
    )


@dataclass(frozen=True)
class Key:
    """One visible key, or the sink: exact score, its error, its row of V."""

    score: Number
    error: Number
    v: list[Number]


def capped(x: Number, error: Number, cap: Number, c: Units, *, stores: bool) -> Number:
    """Error of cap tanh(x / cap)."""
    if stores:
        error += c.u_s * (abs(x) + error) + cap * c.omega_s
    # Towards zero the slope grows, so that the error costs most there.
    moved = cap * (mpmath.tanh(abs(x) / cap) - mpmath.tanh((abs(x) - error) / cap))
    after = min(cap * mpmath.tanh(abs(x) / cap) + moved, cap)
    error = moved + ((1 + c.tanh) * (1 + c.g(6)) - 1) * after + cap * (1 + c.g(6)) * (c.tanh_abs + 2 * c.w)
    return error + ((1 + c.u_s) ** 2 - 1) * (after + error) + (1 + cap) * c.omega_s if stores else error


def keys_of(case: Case, form: Contract, c: Units, row: int) -> tuple[list[Key], int, Number]:
    """(visible keys, with the sink last; number of keys that are summed over; what all scores of the row may be
    larger)."""
    mp, options = mpmath.mpf, case.options
    q = [exact(x) for x in case.arrays["q"][0, 0, row].astype(np.float64)]
    ks = [[exact(x) for x in key] for key in case.arrays["k"][0, 0].astype(np.float64)]
    vs = [[exact(x) for x in key] for key in case.arrays["v"][0, 0].astype(np.float64)]
    n, d = len(ks), len(q)
    alpha = 1 / mpmath.sqrt(d) if options.get("scale") is None else exact(options["scale"])
    visible = [j for j in range(n) if may_attend(case, 0, 0, row, j)]
    cap = None if options.get("softcap") is None else exact(options["softcap"])
    last = cap is not None and options.get("softcap_order") == "after_mask"
    slopes, mask, sinks = (options.get(name) for name in ("alibi_slopes", "attn_mask", "sinks"))
    sink = None if sinks is None else exact(sinks[0])
    additive = mask is not None and mask.dtype != np.bool_
    joins, stores, size_of = additive + (slopes is not None), form.scores.stores, abs(alpha)
    at = position(case, row)
    unsaid = slopes is not None and "alibi_bias" not in options and sink is None and not last
    unsaid = unsaid and all(j <= at for j in visible)
    common = abs(exact(slopes[0])) * abs(at) if unsaid else mp(0)
    k_s = 8 if joins else 6
    g_d = c.g(d)
    reach = max(sum(abs(x) for x in key) for key in ks) + sum(abs(x) for x in q)
    found = []
    for j in visible:
        size = size_of * sum(abs(a * b) for a, b in zip(q, ks[j], strict=True))
        x = alpha * sum(a * b for a, b in zip(q, ks[j], strict=True))
        e = (g_d + 2 * c.u_qk + c.u_qk**2 + k_s * c.u * (1 + c.u_qk) ** 2) * (1 + g_d) * size
        e += (1 + size_of) * (2 * d + 4) * c.w
        e += max(1, size_of) * (1 + 2 * g_d) * c.omega_in * ((1 + c.u_qk) ** 2 * reach + d * c.omega_in)
        terms = added(case, 0, 0, row, j)
        bias = sum(abs(t) for t in terms)
        if unsaid and j > abs(at - j):
            bias += abs(exact(slopes[0])) * (j - abs(at - j))
        total = sum(terms)

        def stored(e: Number, size: Number, times: int) -> Number:
            return e + ((1 + c.u_s) ** times - 1) * (size + e) + times * (1 + size_of) * c.omega_s

        if cap is None or last:
            s = x + total
            e += k_s * c.u * bias if joins else 0
            e = stored(e, abs(s) + bias + common, stores + joins) if stores else e
            if last:
                s, e = cap * mpmath.tanh(s / cap), capped(s, e, cap, c, stores=stores > 0)
        else:
            e = stored(e, abs(x), stores) if stores else e
            s, e = cap * mpmath.tanh(x / cap) + total, capped(x, e, cap, c, stores=stores > 0)
            if joins:
                e += 8 * c.u * bias
                if stores and joins > 1:
                    e += c.u_s * (min(abs(x), cap) + bias + e) + c.omega_s
                if stores:
                    e += c.u_s * (abs(s) + common + e) + c.omega_s
        found.append(Key(s, e, vs[j]))
    if sink is not None:
        found.append(Key(sink, (6 * c.u + c.u_s) * abs(sink) + c.omega_s, [mp(0)] * len(vs[0])))
    return found, n + (sink is not None), common


@dataclass(frozen=True)
class Weighed:
    """One row's exact numbers and what its weights may be off by."""

    shift: Number
    ell: Number
    lse: Number
    rho: list[Number]
    over: Number

    def p(self, key: Key) -> Number:
        return mpmath.exp(key.score - self.lse)


def weigh(keys: list[Key], form: Contract, c: Units, n: int, common: Number) -> Weighed:
    exp, log = mpmath.exp, mpmath.log
    m = max(key.score for key in keys)
    ell = sum(exp(key.score - m) for key in keys)
    lse = m + log(ell)
    over = max(0, max(key.score + key.error for key in keys) - m)
    e_exp = e_log = 4 * c.u
    e_ln = mpmath.mpf(2) ** mpmath.mpf("2.6") * c.u
    rho = []
    for key in keys:
        s, e = key.score, key.error
        r = e + (6 * c.u * (1 + c.u_d) + c.u_d) * (m - s + exact(form.sums.lag) + e + over) + c.omega_d
        r -= log(1 - e_exp) * (1 + rescales(form, n))
        if form.sums.row_sum == "rounded":
            r -= log(1 - c.u_p)
        if form.sums.splits > 1:
            far = 4 * (max(abs(s), abs(m)) + common) + 3 * (max(abs(s), abs(lse)) + common) + 6 * (lse - s + log(n))
            r += mpmath.mpf("1.001") * c.u * far + e_log * log(n) + e_ln - log(1 - e_exp)
        rho.append(r)
    return Weighed(m, ell, lse, rho, over)


def tiles(n: int) -> int:
    return -(-n // 16)


def rescales(form: Contract, n: int) -> int:
    whole = form.weights.normalised and (form.scores.stores or form.scores.prescale != "none")
    return 0 if whole else tiles(n) - 1


def late_sink(keys: list[Key], row: Weighed, c: Units, n: int) -> tuple[list[Number], Number]:
    """(what joins each rho, what joins dL) for a sink that joins late."""
    log = mpmath.log
    sink, top = keys[-1].score, max((key.score for key in keys[:-1]), default=keys[-1].score)
    apart, e_ln = abs(sink - top), mpmath.mpf(2) ** mpmath.mpf("2.6") * c.u
    late = c.u * (6 * (2 * apart + log(n) + 1) + 4 * abs(top) + 3 * (abs(top) + log(n)))
    late += 2 * (-2 * log(1 - 4 * c.u) + 4 * c.u * log(n + 1) + e_ln) + c.u_d * apart
    heavy = row.p(keys[-1]) > 0.5
    joins = [late if (key is keys[-1]) != heavy else mpmath.mpf(0) for key in keys]
    reach = log(mpmath.mpf(2) ** (1024 if c.precision == 53 else 128)) + 1
    outside = c.u * (6 * apart + 4 * abs(top)) - log(1 - 4 * c.u) if sink > top and apart <= reach else 0
    return joins, outside + c.u * (3 * abs(row.lse) + 3) + 4 * c.u + e_ln


def bound_of_lse(
    keys: list[Key], row: Weighed, form: Contract, c: Units, n: int, fmt: Format, common: Number, joins: Number
) -> Number:
    exp, log = mpmath.exp, mpmath.log
    depth = c.g(n + 2 * tiles(n) + 2)
    top = [exp(key.score - row.lse + r) for key, r in zip(keys, row.rho, strict=True)]
    lme = log(1 + sum(t * (1 - exp(-r)) for t, r in zip(top, row.rho, strict=True)))
    size = abs(row.lse) + common
    d_l = lme - log(1 - depth) + n * c.w + 4 * c.u * (log(row.ell) + lme + depth)
    d_l += mpmath.mpf(2) ** mpmath.mpf("2.6") * c.u + c.u * (4 * (abs(row.shift) + common) + 3 * size)
    gain = exp(sum(row.p(key) * r for key, r in zip(keys, row.rho, strict=True)))
    d_l += -log(1 - min(1, gain / row.ell) * n * c.omega_p) if form.sums.row_sum == "rounded" else 0
    d_l += (form.sums.splits + 1) * c.u + 3 * c.u * size if form.sums.splits > 1 else 0
    d_l = (d_l + joins) * (1 + 8 * c.u)
    if fmt.precision < c.precision:
        d_l += mpmath.mpf(2) ** -fmt.precision * (size + d_l) + mpmath.mpf(2) ** (fmt.emin - fmt.precision)
    return d_l


def plain_bound(
    case: Case, form: Contract, fmt: Format, lse_format: Format, row: int
) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """(bound of O per column, bound of L) of one row that sees a key."""
    exp, log = mpmath.exp, mpmath.log
    c = units(form, fmt)
    keys, n, common = keys_of(case, form, c, row)
    has_sink = case.options.get("sinks") is not None
    u_div, e_exp = 4 * c.u, 4 * c.u
    normal, split = form.weights.normalised, form.sums.splits > 1
    weighed = weigh(keys, form, c, n, common)
    joins_lse = mpmath.mpf(0)
    if has_sink:
        joins, joins_lse = late_sink(keys, weighed, c, n)
        rho = [a + b for a, b in zip(weighed.rho, joins, strict=True)]
        weighed = Weighed(weighed.shift, weighed.ell, weighed.lse, rho, weighed.over)
    rho, p = weighed.rho, [weighed.p(key) for key in keys]
    depth = c.g(n + 2 * tiles(n) + 2)
    top = [exp(key.score - weighed.lse + r) for key, r in zip(keys, rho, strict=True)]
    moved = [t * (1 - exp(-r)) for t, r in zip(top, rho, strict=True)]
    gain = exp(sum(a * r for a, r in zip(p, rho, strict=True)))
    k_p = (1 + (0 if form.sums.row_sum == "rounded" else c.u_p)) * (1 + depth) - 1
    k_p += u_div * (1 + k_p) if normal else 0
    k_p += ((1 + u_div) * (1 + c.u) * (1 + c.g(form.sums.splits + 2)) - 1) * (1 + k_p) if split else 0
    h_out = (1 + (0 if normal else u_div)) * (1 + c.u_o) ** form.output.stores / (1 - depth)
    h_out *= (1 + u_div) * (1 + 2 * c.u) if has_sink else 1
    h_out += n * c.w - 1
    h_all = h_out
    if normal and rescales(form, n):
        unit = 6 * c.u * (1 + c.u_d) + c.u_d
        apart = [
            2 * (unit * (weighed.shift - key.score + exact(form.sums.lag) + key.error + weighed.over) + c.omega_d)
            - log(1 - e_exp) * (2 + rescales(form, n))
            for key in keys
        ]
        x = sum(min(1, gain * t) * (1 - exp(-a)) for t, a in zip(top, apart, strict=True))
        h_all = h_out + x / (1 - x) * (1 + h_out)
    per_sum = min(1, gain / weighed.ell)
    if form.scores.maximum == "rounded":
        # The largest weight is e^-x at least.
        off = max(weighed.over, max(keys, key=lambda key: key.score).error)
        per_sum *= exp(c.u * (1 + 8 * c.u) * (abs(weighed.shift) + common + off))
    bounds = []
    for column in zip(*(key.v for key in keys), strict=True):
        out = sum(a * x for a, x in zip(p, column, strict=True))
        gap = [abs(x - out) for x in column]
        size, farthest = sum(abs(x) for x in column), max(gap)
        spread = min(size + len(keys) * abs(out), len(keys) * farthest)
        inner = min(gain * sum(a * x for a, x in zip(moved, gap, strict=True)), farthest)
        inner += k_p * min(
            gain * sum(t * abs(x) for t, x in zip(top, column, strict=True)), max(abs(x) for x in column)
        )
        lost = c.omega_p * (spread if form.sums.row_sum == "rounded" else size)
        inner += lost if normal else per_sum * lost
        inner += per_sum * (c.w * spread + n * tiles(n) * c.w) + n * c.w
        inner += form.sums.splits * c.w * farthest if split else 0
        end = c.omega_o if form.output.stores == 1 else form.output.stores * c.omega_o * (1 + h_out)
        bounds.append(inner + h_all * (abs(out) + inner) + end)
    if has_sink and case.options.get("lse_sink") == "excluded":
        bare = weigh(keys[:-1], form, c, n - 1, common)
        d_l = bound_of_lse(keys[:-1], bare, form, c, n - 1, lse_format, common, mpmath.mpf(0))
    else:
        d_l = bound_of_lse(keys, weighed, form, c, n, lse_format, common, joins_lse)
    return bounds, d_l
