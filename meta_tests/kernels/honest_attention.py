"""Attention kernels in real float32 (or float64) arithmetic that keep their contract: what no bound may reject.

`run` evaluates one head by the steps of a `Kernel`. Everything a contract leaves open is a field: the form of the
exponent, the order of sums, tiles, splits, where the scale goes, which error exp makes within its limit. Shares no
code with the oracle but the rounding to a format.

Shapes: q [Sq, D], k [Sk, D], v [Sk, Dv], visible bool [Sq, Sk], bias [Sq, Sk] or None; float64 arrays that hold
stored numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from meta_tests.kernels.honest_machine import LN_2, LOG2_E, Array, Kernel, Machine
from meta_tests.kernels.honest_options import Options, multiplies_late, offsets, renormalised, scores, sink_logit
from oracle.formats import FORMATS, Format


@dataclass(frozen=True)
class Part:
    out: Array
    lse: Array


def run(
    kernel: Kernel,
    fmt: Format,
    q: Array,
    k: Array,
    v: Array,
    *,
    alpha: float,
    visible: Array,
    bias: Array | None = None,
    options: Options | None = None,
    push: Array | float = 0.0,
) -> Part:
    """O [Sq, Dv] rounded to ``fmt`` and L [Sq, 1] in the compute format; ``push`` [Sq, Sk]: which way exp errs."""
    m = Machine(kernel, fmt)
    with np.errstate(all="ignore"):
        return _run(m, q, k, v, alpha, visible, Options(bias) if options is None else options, push)


def _run(
    m: Machine, q: Array, k: Array, v: Array, alpha: float, visible: Array, options: Options, push: Array | float
) -> Part:
    kernel, real = m.kernel, m.real
    if kernel.flush:
        q, k, v = (np.where(np.abs(a) < m.fmt.smallest_normal, 0.0, a) for a in (q, k, v))
    q, k, v = (np.asarray(a, dtype=real) for a in (q, k, v))
    if kernel.tf32:
        q, k, v = (m.store(a, FORMATS["tf32"]) for a in (q, k, v))
    base = 2.0 if kernel.exponent != "natural" else np.e
    factor = real(alpha)
    if base == 2.0 and options.cap is None:
        factor = real(factor * real(LOG2_E))
    late: Any = factor
    if kernel.scale_on in ("q", "q_stored"):
        q, late = m.keep(q * factor), None
        q = m.store(q) if kernel.scale_on == "q_stored" else q
    elif kernel.scale_on.startswith("sqrt"):
        root = real(np.sqrt(real(alpha)))
        q, k, late = (
            m.keep(q * root),
            m.keep(k * root),
            None if base == np.e or options.cap is not None else real(LOG2_E),
        )
        if kernel.scale_on == "sqrt_stored":
            q, k = m.store(q), m.store(k)
    natural = options.cap is not None and options.cap_last
    terms = offsets(m, options, np.e if natural else base)
    keys = k.shape[0]
    borders = [keys * i // kernel.splits for i in range(kernel.splits + 1)]
    parts = []
    for a, b in itertools.pairwise(borders):
        if b > a:
            part_push = push[:, a:b] if isinstance(push, np.ndarray) and push.shape[1] == keys else push
            at = kernel.sink == "each split" or (not parts and kernel.sink not in ("late", "dropped"))
            sink = options.sink if at else None
            more = [term[:, a:b] for term in terms]
            how = (late, base, visible[:, a:b], options, more, sink, part_push)
            parts.append(_sweep(m, q, k[a:b], v[a:b], *how))
    late_sink = options.sink if kernel.sink == "late" else None
    out, lse = parts[0] if kernel.splits == 1 else _merge(m, parts, late_sink)
    return Part(m.store(m.keep(out)), lse)


def _exponent(m: Machine, t: Array, factor: Any, top: Array) -> Array:
    if factor is None:
        gap = m.keep(t - top)
        return m.store(gap) if m.kernel.shifted else gap
    if m.kernel.exponent == "fma":
        return m.fma(t, factor, -m.keep(top * factor))
    return m.keep(m.keep(t - top) * factor)


def _sweep(
    m: Machine,
    q: Array,
    k: Array,
    v: Array,
    late: Any,
    base: float,
    visible: Array,
    options: Options,
    terms: list[Array],
    sink: float | None,
    push: Array | float,
) -> tuple[Array, Array]:
    kernel, real = m.kernel, m.real
    rows, width = q.shape[0], v.shape[1]
    acc_fmt = FORMATS[kernel.accumulator] if kernel.accumulator else None
    sum_fmt = FORMATS[kernel.row_sum] if kernel.row_sum else None
    top = np.full((rows, 1), -np.inf, real)
    total, acc = np.zeros((rows, 1), real), np.zeros((rows, width), real)
    starts = list(range(0, k.shape[0], kernel.tile))
    if kernel.reverse_tiles:
        starts.reverse()
    factor: Any = None
    if sink is not None and kernel.sink in ("first", "each split"):
        units = LOG2_E if multiplies_late(m, options, base) else None
        top = np.full((rows, 1), sink_logit(m, sink, base, units), real)
        total = np.ones((rows, 1), real)
    for start in starts:
        here = slice(start, start + kernel.tile)
        t, factor = scores(m, q, k[here], late, options, [term[:, here] for term in terms], base)
        t = np.where(visible[:, here], t, -np.inf)
        most = t.max(axis=1, keepdims=True)
        lag = real(kernel.lag if base == np.e else kernel.lag * LOG2_E)
        # In the forms that scale late, the maximum is one of raw products.
        behind = (most - top) * (factor if factor is not None else 1)
        new = np.where((behind > lag) | np.isneginf(top), most, top) if kernel.lag else np.maximum(top, most)
        shift = np.where(np.isneginf(new), real(0), new)
        some_push = push[:, here] if isinstance(push, np.ndarray) and push.shape[1] == k.shape[0] else push
        p = np.where(visible[:, here], m.power(_exponent(m, t, factor, shift), base, some_push), real(0))
        drop = m.keep(top - shift) if factor is None else m.keep(m.keep(top - shift) * factor)
        drop = m.store(drop) if kernel.shifted else drop
        rescale = np.where(np.isneginf(top), real(0), m.power(drop, base, -1.0 if kernel.spite == "rescale" else 0.0))
        cast = m.cast(p)
        total = m.keep(total * rescale)
        total = m.sum(cast if kernel.rounded_sum else p, 1, total[:, 0], sum_fmt)[:, None]
        if not kernel.normalised:
            acc = m.keep(acc * rescale)
            acc = acc if acc_fmt is None else m.store(acc, acc_fmt)
            acc = _accumulate(m, acc, cast, v[here], acc_fmt)
        top = new
    shift = np.where(np.isneginf(top), real(0), top)
    if sink is not None and kernel.sink in ("last", "outside"):
        logit = sink_logit(m, sink, base, factor)
        most = np.where(np.isneginf(top), logit, np.maximum(top, logit)) if kernel.sink == "last" else shift
        drop, own = m.keep(shift - most), m.keep(logit - most)
        if factor is not None:
            drop, own = m.keep(drop * factor), m.keep(own * factor)
        # Maxima that overflowed, of keys masked with the lowest number, have no weight.
        rescale = np.where(np.isneginf(top), real(0), m.power(drop, base, 0.0))
        total = m.keep(m.keep(total * rescale) + m.power(own, base, 0.0))
        acc, shift = m.keep(acc * rescale), most
    if kernel.normalised:
        for start in starts:
            here = slice(start, start + kernel.tile)
            t, factor = scores(m, q, k[here], late, options, [term[:, here] for term in terms], base)
            some_push = push[:, here] if isinstance(push, np.ndarray) and push.shape[1] == k.shape[0] else push
            p = np.where(visible[:, here], m.power(_exponent(m, t, factor, shift), base, some_push), real(0))
            p = m.divide(p, total)
            cast = m.cast(p)
            acc = _accumulate(m, acc, cast, v[here], acc_fmt)
        out = acc
    else:
        out = m.divide(acc, total)
    lse = _lse(m, shift, total, factor, base)
    return (out, lse) if sink is None or "sigmoid" not in kernel.sink else renormalised(m, out, lse, sink)


def _accumulate(m: Machine, acc: Array, p: Array, v: Array, fmt: Format | None) -> Array:
    return m.dot(p, v, acc, fmt) if m.kernel.in_place else m.keep(acc + m.dot(p, v, None, fmt))


def _lse(m: Machine, top: Array, total: Array, factor: Any, base: float) -> Array:
    real = m.real
    if base == np.e:
        return m.keep(top + np.log(total))
    scaled = top if factor is None else m.keep(top * factor)
    return m.keep(m.keep(scaled + np.log2(total)) * real(LN_2))


def _merge(m: Machine, parts: list[tuple[Array, Array]], sink: float | None) -> tuple[Array, Array]:
    if sink is not None:
        parts = [*parts, (np.zeros_like(parts[0][0]), np.full_like(parts[0][1], m.keep(sink)))]
    lses = np.stack([lse for _, lse in parts])
    top = lses.max(axis=0)
    shares = np.where(
        np.isneginf(lses), m.real(0), m.power(m.keep(lses - np.where(np.isneginf(top), 0, top)), np.e, 0.0)
    )
    total = m.sum(shares, 0)
    outs = np.stack([np.where(share > 0, out, m.real(0)) for share, (out, _) in zip(shares, parts, strict=True)])
    out = m.sum(m.keep(shares * outs), 0)
    return m.divide(out, total), m.keep(top + np.log(total))


KERNELS: dict[str, Kernel] = {
    "tile 1": Kernel({"preset": "flash", "tile": 1}, tile=1),
    "tile 1 normalised": Kernel(
        {"preset": "flash", "tile": 1, "normalised_p": True}, tile=1, normalised=True, spite="rescale"
    ),
    "tile 16": Kernel(tile=16),
    "tile 128": Kernel(tile=128, order="pairwise"),
    "in place": Kernel(in_place=True),
    "fma chains": Kernel(order="fma", in_place=True, exponent="fma"),
    "lanes": Kernel(order="lanes", reciprocal=True),
    "backward": Kernel(order="backward", reverse_tiles=True),
    "blas": Kernel(order="blas", tile=64),
    "scaled": Kernel(exponent="scaled"),
    "fma": Kernel(exponent="fma", tile=16),
    "late": Kernel(exponent="late"),
    "scale on q": Kernel(scale_on="q", exponent="scaled"),
    "rough exp": Kernel(spite="weights"),
    "rough rescale": Kernel(spite="rescale", tile=16),
    "uncast": Kernel({"preset": "fp32"}, exponent="fma", cast=False),
    "split 2": Kernel({"preset": "flash", "splits": 2}, splits=2, exponent="fma"),
    "split 8": Kernel({"preset": "flash", "splits": 8}, splits=8),
    "normalised": Kernel({"preset": "flash", "normalised_p": True}, normalised=True),
    "normalised rough": Kernel({"preset": "flash", "normalised_p": True}, normalised=True, spite="rescale", tile=16),
    "coarse exp, normalised": Kernel(
        {"preset": "flash", "normalised_p": True, "exp": 2.0**-10},
        normalised=True,
        spite="rescale",
        tile=16,
        exp_error=2.0**-10,
    ),
    "rounded sum": Kernel({"preset": "flash", "row_sum": "rounded"}, rounded_sum=True),
    "lazy": Kernel({"preset": "flash", "lag": 8 * LN_2}, lag=8 * LN_2, tile=16, exponent="fma"),
    "eager": Kernel({"preset": "eager"}, ("fp16", "bf16", "fp32"), stores=2, normalised=True, tile=4096),
    "sqrt scale": Kernel({"preset": "sdpa_math"}, scale_on="sqrt", normalised=True, tile=4096, cast=False),
    "sqrt scale stored": Kernel({"preset": "flash", "qk_prescale": "input"}, ("fp16", "bf16"), scale_on="sqrt_stored"),
    "scaled q stored": Kernel({"preset": "flash", "qk_prescale": "input"}, ("fp16", "bf16"), scale_on="q_stored"),
    "tf32": Kernel({"preset": "tf32"}, ("fp32",), tf32=True, exponent="fma"),
    "tf32 normalised": Kernel({"preset": "tf32", "normalised_p": True}, ("fp32",), tf32=True, normalised=True),
    "fp64": Kernel({"preset": "fp64"}, ("fp64",), compute="fp64"),
    "fp64 split": Kernel({"preset": "fp64", "splits": 4}, ("fp64",), compute="fp64", splits=4, exponent="scaled"),
    "fp16 accumulator": Kernel(
        {"preset": "flash", "accumulator": "fp16"}, ("fp16",), accumulator="fp16", in_place=True
    ),
    "bf16 row sum": Kernel({"preset": "flash", "row_sum": "bf16"}, ("bf16",), row_sum="bf16"),
    "flush": Kernel({"preset": "flash", "flush": True}, flush=True, exponent="fma"),
}
