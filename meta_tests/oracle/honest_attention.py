"""Attention kernels in real float32 (or float64) arithmetic that keep their contract: what no bound may reject.

`run` evaluates one head by the steps of a `Kernel`. Everything a contract leaves open is a field: the form of the
exponent, the order of sums, tiles, splits, where the scale goes, which error exp makes within its limit. Shares no
code with the oracle but the rounding to a format.

Shapes: q [Sq, D], k [Sk, D], v [Sk, Dv], visible bool [Sq, Sk], bias [Sq, Sk] or None; float64 arrays that hold
stored numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, Format

Array = NDArray[Any]
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Kernel:
    """An honest kernel. ``contract``: the fields it declares; ``formats``: the input formats it is run in.

    exponent: ``natural`` exp(t alpha - m); ``scaled`` exp2(t alpha2 - M); ``fma`` exp2(fma(t, alpha2, -m alpha2));
    ``late`` exp2((t - m) alpha2). alpha2 = alpha log2 e. scale_on: ``scores``, ``q`` (in float32), ``sqrt`` (both, in
    float32), ``q_stored``, ``sqrt_stored`` (in the input format). order: of every sum. spite: whose exp errs at its
    limit, that of ``weights`` (as ``push`` says) or of ``rescale`` (always low); exp_error: that limit, four units if
    None.
    in_place: P V adds key by key to the running output instead of a fresh sum per tile.
    """

    contract: dict[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ("fp32", "fp16", "bf16")
    exponent: str = "natural"
    scale_on: str = "scores"
    tile: int = 32
    splits: int = 1
    order: str = "forward"
    cast: bool = True
    in_place: bool = False
    normalised: bool = False
    rounded_sum: bool = False
    stores: int = 0
    lag: float = 0.0
    tf32: bool = False
    compute: str = "fp32"
    accumulator: str | None = None
    row_sum: str | None = None
    flush: bool = False
    spite: str = "none"
    exp_error: float | None = None
    reciprocal: bool = False
    reverse_tiles: bool = False


class Machine:
    """Arithmetic of one kernel: every method rounds as the hardware that it stands for."""

    def __init__(self, kernel: Kernel, fmt: Format) -> None:
        self.kernel, self.fmt = kernel, fmt
        self.real = np.float64 if kernel.compute == "fp64" else np.float32
        self.wide = FORMATS[kernel.compute]
        self.narrow = fmt.precision < self.wide.precision

    def keep(self, x: Array) -> Array:
        """A result in the compute format, subnormals flushed if the kernel flushes."""
        x = np.asarray(x, dtype=self.real)
        if self.kernel.flush:
            x = np.where(np.abs(x) < self.wide.smallest_normal, self.real(0), x)
        return x

    def store(self, x: Array, fmt: Format | None = None) -> Array:
        """Rounded to a format (default: the input's) and widened again."""
        target = self.fmt if fmt is None else fmt
        if target.precision >= self.wide.precision:
            return x
        y = x.astype(target.dtype).astype(self.real) if target.name != "tf32" else target.round(x).astype(self.real)
        if self.kernel.flush:
            y = np.where(np.abs(y) < target.smallest_normal, self.real(0), y)
        return y

    def cast(self, p: Array) -> Array:
        """P as the product with V takes it."""
        if self.kernel.tf32:
            return self.store(p, FORMATS["tf32"])
        return self.store(p) if self.kernel.cast else p

    def sum(self, terms: Array, axis: int, start: Array | None = None, fmt: Format | None = None) -> Array:
        """Sum along an axis in the kernel's order, from ``start`` if given; ``fmt``: format of the running sum."""

        def add(a: Array, b: Array) -> Array:
            total = self.keep(a + b)
            return total if fmt is None else self.store(total, fmt)

        parts = list(np.moveaxis(terms, axis, 0))
        if self.kernel.order == "backward":
            parts.reverse()
        if self.kernel.order == "pairwise" and fmt is None:
            while len(parts) > 1:
                parts = [
                    add(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
                ]
            return parts[0] if start is None else add(start, parts[0])
        if self.kernel.order == "lanes" and fmt is None:
            lanes = [self._chain(parts[i::4], add) for i in range(min(4, len(parts)))]
            total = self._chain(lanes, add)
            return total if start is None else add(start, total)
        if start is not None:
            parts = [start, *parts]
        return self._chain(parts, add)

    @staticmethod
    def _chain(parts: list[Array], add: Callable[[Array, Array], Array]) -> Array:
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part)
        return total

    def dot(self, a: Array, b: Array, start: Array | None = None, fmt: Format | None = None) -> Array:
        """a [n, k] times b [k, m] (+ start)."""
        if self.kernel.order == "blas" and fmt is None:
            product = self.keep(np.matmul(a, b))
            return product if start is None else self.keep(start + product)
        if self.kernel.order == "fma" and fmt is None and self.real is np.float32:
            total = np.zeros((a.shape[0], b.shape[1]), self.real) if start is None else start
            for i in range(a.shape[1]):
                # The product of two float32 is exact in float64; one more rounding there is 2^-29 of the final one.
                total = self.keep(a[:, i, None].astype(np.float64) * b[None, i] + total)
            return total
        return self.sum(self.keep(a[:, :, None] * b[None]), 1, start, fmt)

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        return self.keep(a.astype(np.float64) * b + c) if self.real is np.float32 else self.keep(a * b + c)

    def power(self, x: Array, base: float, push: Array | float) -> Array:
        """base^x, the result moved by ``push`` (in -1..1) times what the contract allows beyond numpy's own error."""
        y = self.keep(np.exp2(x) if base == 2.0 else np.exp(x))
        if not np.any(push):
            return y
        # numpy's own exp errs by less than one unit of the limit.
        unit = self.wide.unit_roundoff
        room = (4 * unit if self.kernel.exp_error is None else self.kernel.exp_error) - 1.5 * unit
        return np.where(x == 0, y, self.keep(y.astype(np.float64) * (1 + room * np.asarray(push))))

    def divide(self, a: Array, b: Array) -> Array:
        return self.keep(a * self.keep(self.real(1) / b)) if self.kernel.reciprocal else self.keep(a / b)


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
    push: Array | float = 0.0,
) -> Part:
    """O [Sq, Dv] rounded to ``fmt`` and L [Sq, 1] in the compute format; ``push`` [Sq, Sk]: which way exp errs."""
    m = Machine(kernel, fmt)
    with np.errstate(all="ignore"):
        return _run(m, q, k, v, alpha, visible, bias, push)


def _run(
    m: Machine, q: Array, k: Array, v: Array, alpha: float, visible: Array, bias: Array | None, push: Array | float
) -> Part:
    kernel, real = m.kernel, m.real
    if kernel.flush:
        q, k, v = (np.where(np.abs(a) < m.fmt.smallest_normal, 0.0, a) for a in (q, k, v))
    q, k, v = (np.asarray(a, dtype=real) for a in (q, k, v))
    if kernel.tf32:
        q, k, v = (m.store(a, FORMATS["tf32"]) for a in (q, k, v))
    base = 2.0 if kernel.exponent != "natural" else np.e
    factor = real(alpha)
    if base == 2.0:
        factor = real(factor * real(LOG2_E))
    late: Any = factor
    if kernel.scale_on in ("q", "q_stored"):
        q, late = m.keep(q * factor), None
        q = m.store(q) if kernel.scale_on == "q_stored" else q
    elif kernel.scale_on.startswith("sqrt"):
        root = real(np.sqrt(real(alpha)))
        q, k, late = m.keep(q * root), m.keep(k * root), None if base == np.e else real(LOG2_E)
        if kernel.scale_on == "sqrt_stored":
            q, k = m.store(q), m.store(k)
    added = None
    if bias is not None:
        added = m.keep(bias.astype(real))
        added = m.keep(added * real(LOG2_E)) if base == 2.0 else added
    keys = k.shape[0]
    borders = [keys * i // kernel.splits for i in range(kernel.splits + 1)]
    parts = []
    for a, b in itertools.pairwise(borders):
        if b > a:
            part_push = push[:, a:b] if isinstance(push, np.ndarray) and push.shape[1] == keys else push
            part_bias = None if added is None else added[:, a:b]
            parts.append(_sweep(m, q, k[a:b], v[a:b], late, base, visible[:, a:b], part_bias, part_push))
    out, lse = parts[0] if kernel.splits == 1 else _merge(m, parts)
    return Part(m.store(m.keep(out)), lse)


def _scores(m: Machine, q: Array, k: Array, late: Any, bias: Array | None) -> tuple[Array, Array | None]:
    """(t, factor): the exponent is t factor, or t itself where the factor is None."""
    kernel = m.kernel
    t = m.dot(q, k.T)
    if kernel.stores:
        t = m.store(t)
    if late is None or (kernel.exponent in ("fma", "late") and bias is None and not kernel.stores):
        s, factor = t, late
    else:
        s, factor = m.keep(t * late), None
    if kernel.stores:
        s = m.store(s)
    if bias is not None:
        s = m.keep(s + bias)
        s = m.store(s) if kernel.stores else s
    return s, factor


def _exponent(m: Machine, t: Array, factor: Any, top: Array) -> Array:
    if factor is None:
        return m.keep(t - top)
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
    bias: Array | None,
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
    for start in starts:
        here = slice(start, start + kernel.tile)
        t, factor = _scores(m, q, k[here], late, None if bias is None else bias[:, here])
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
    if kernel.normalised:
        for start in starts:
            here = slice(start, start + kernel.tile)
            t, factor = _scores(m, q, k[here], late, None if bias is None else bias[:, here])
            some_push = push[:, here] if isinstance(push, np.ndarray) and push.shape[1] == k.shape[0] else push
            p = np.where(visible[:, here], m.power(_exponent(m, t, factor, shift), base, some_push), real(0))
            p = m.divide(p, total)
            cast = m.cast(p)
            acc = _accumulate(m, acc, cast, v[here], acc_fmt)
        out = acc
    else:
        out = m.divide(acc, total)
    return out, _lse(m, shift, total, factor, base)


def _accumulate(m: Machine, acc: Array, p: Array, v: Array, fmt: Format | None) -> Array:
    return m.dot(p, v, acc, fmt) if m.kernel.in_place else m.keep(acc + m.dot(p, v, None, fmt))


def _lse(m: Machine, top: Array, total: Array, factor: Any, base: float) -> Array:
    real = m.real
    if base == np.e:
        return m.keep(top + np.log(total))
    scaled = top if factor is None else m.keep(top * factor)
    return m.keep(m.keep(scaled + np.log2(total)) * real(LN_2))


def _merge(m: Machine, parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
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
