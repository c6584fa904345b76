"""Soft cap, additive mask, ALiBi and sinks as honest kernels make them (`honest_attention`).

tanh: ``numpy``; ``ratio`` (1 - e) / (1 + e) with e = exp(-2|x|); ``sigmoid`` 2 / (1 + exp(-2x)) - 1; ``one minus``
1 - 2 / (exp(2x) + 1); ``approximate``, off by a relative 2^-11 like the hardware's. Their exp errs at its limit if the
kernel's spite is ``tanh``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meta_tests.kernels.honest_machine import LOG2_E, Array, Machine


@dataclass(frozen=True)
class Options:
    """bias [Sq, Sk]; slope times distance (|i - j|, [Sq, Sk]) is subtracted; cap_last: after those two join."""

    bias: Array | None = None
    cap: float | None = None
    cap_last: bool = False
    slope: float | None = None
    distance: Array | None = None
    sink: float | None = None

    @property
    def plain(self) -> bool:
        """Whether a score is nothing but scale q k."""
        return self.bias is None and self.slope is None and self.cap is None


def offsets(m: Machine, options: Options, base: float) -> list[Array]:
    """What joins the scores [Sq, Sk], in units of the exponent to ``base``."""
    terms = []
    unit = m.real(LOG2_E) if base == 2.0 else None
    if options.slope is not None and options.distance is not None:
        slope = m.keep(options.slope)
        reach = -options.distance
        if m.kernel.alibi == "key index":
            slope, reach = slope, np.broadcast_to(np.arange(reach.shape[1]), reach.shape)
        if m.kernel.alibi == "folded" and unit is not None:
            terms.append(m.keep(m.keep(slope * unit) * reach.astype(m.real)))
        else:
            alibi = m.keep(slope * reach.astype(m.real))
            terms.append(alibi if unit is None else m.keep(alibi * unit))
    if options.bias is not None:
        bias = m.keep(options.bias.astype(m.real))
        terms.append(bias if unit is None else m.keep(bias * unit))
    return terms


def scores(m: Machine, q: Array, k: Array, late: Any, options: Options, terms: list[Array], base: float) -> Any:
    """(t, factor): the exponent is t factor, or t itself where the factor is None. late: scale still to be applied."""
    kernel = m.kernel
    t = m.dot(q, k.T)
    if kernel.stores:
        t = m.store(t)
    if options.cap is None:
        plain = options.plain and options.sink is None and not kernel.stores
        if late is None or (kernel.exponent in ("fma", "late") and plain):
            s, factor = t, late
        else:
            s, factor = m.keep(t * late), None
        return joined(m, m.store(s) if kernel.stores else s, terms), factor
    cap = m.real(options.cap)
    if kernel.exponent == "scaled" and late is not None and not options.cap_last and not kernel.stores:
        share = m.keep(t * m.keep(late / cap))
    else:
        s = t if late is None else m.keep(t * late)
        s = m.store(s) if kernel.stores else s
        if options.cap_last:
            s = joined(m, s, terms)
        share = m.keep(s * m.keep(m.real(1) / cap)) if kernel.exponent == "fma" else m.keep(s / cap)
    y = tanh(m, m.store(share) if kernel.stores else share)
    y = m.store(y) if kernel.stores else y
    late_log = multiplies_late(m, options, base)
    y = m.keep(y * (cap if late_log or base != 2.0 else m.keep(cap * m.real(LOG2_E))))
    y = m.store(y) if kernel.stores else y
    if not options.cap_last:
        y = joined(m, y, terms)
    return y, m.real(LOG2_E) if late_log else None


def multiplies_late(m: Machine, options: Options, base: float) -> bool:
    """Whether capped scores stay in natural units up to the exponent.

    Not if a mask joins them: fma(S, log2 e, -M) at -1e30 is far from 0 where it should be 0.
    """
    bounded = options.cap_last or (options.bias is None and options.slope is None)
    return options.cap is not None and base == 2.0 and m.kernel.exponent != "scaled" and bounded


def joined(m: Machine, s: Array, terms: list[Array]) -> Array:
    for term in terms:
        s = m.keep(s + term)
        s = m.store(s) if m.kernel.stores else s
    return s


def tanh(m: Machine, x: Array) -> Array:
    real, one, two = m.real, m.real(1), m.real(2)
    push = {"tanh": 1.0, "tanh low": -1.0}.get(m.kernel.spite, 0.0)
    match m.kernel.tanh:
        case "numpy":
            return m.keep(np.tanh(x))
        case "approximate":
            room = m.kernel.tanh_error - m.wide.unit_roundoff
            return m.keep(np.tanh(x.astype(np.float64)) * (1 + room * (push or 1.0)))
        case "ratio":
            e = m.power(m.keep(np.abs(x) * real(-2 * LOG2_E)), 2.0, push)
            return m.keep(np.sign(x) * m.divide(m.keep(one - e), m.keep(one + e)))
        case "sigmoid":
            e = m.power(m.keep(-two * x), np.e, push)
            return m.keep(two * m.divide(one, m.keep(one + e)) - one)
        case "one minus":
            e = m.power(m.keep(two * x), np.e, push)
            return m.keep(one - m.divide(two, m.keep(e + one)))
    raise ValueError(m.kernel.tanh)


def sink_logit(m: Machine, sink: float, base: float, factor: Any) -> Any:
    """The sink in the units of what the running maximum is one of."""
    return m.keep(sink) if base == np.e or factor is not None else m.keep(m.keep(sink) * m.real(LOG2_E))


def keys(options: Options, a: int, b: int) -> Options:
    """The same for a range of the keys; the arrays of all of them stay where they are needed whole."""
    return replace(options, bias=None if options.bias is None else options.bias[:, a:b])


def renormalised(m: Machine, out: Array, lse: Array, sink: float) -> tuple[Array, Array]:
    """(O, L) from those of the keys alone and the sink: O sigmoid(L - s), L = logaddexp(L, s)."""
    one, logit = m.real(1), m.keep(sink)
    if m.kernel.sink == "sigmoid stored":
        out = m.store(out)
    # exp overflows to inf where the sink is far above, which leaves 0.
    share = m.divide(one, m.keep(one + m.power(m.keep(logit - lse), np.e, 0.0)))
    top = np.maximum(lse, logit)
    gap = m.power(m.keep(-np.abs(m.keep(lse - logit))), np.e, 0.0)
    # A split that saw no key has no O of its own.
    return np.where(np.isneginf(lse), m.real(0), m.keep(out * share)), m.keep(top + m.keep(np.log1p(gap)))
