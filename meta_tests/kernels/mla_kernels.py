"""Honest MLA kernels in numpy: the roundings that contracts allow, and nothing of the oracle's formulas.

One head at a time, float32 (or float64) sums in a chosen order, stages rounded to a storage format where a
kernel stores them. What `Kernel` leaves at its default is kept wide. `broken` names one defect, for the proof
that the bounds can be exceeded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS

Array = NDArray[Any]
ORDERS = ("forward", "backward", "lanes", "fused")


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one kernel computes: storage formats (None: wide), order of sums, tiles, splits, maximum, exp."""

    form: str
    up: str | None = None
    latent: str | None = None
    weights: str | None = None
    stores: str | None = None
    operands: str | None = None
    wide: Any = np.float32
    order: str = "forward"
    normalised: bool = False
    prescaled: bool = False
    rounded_sum: bool = False
    base_two: bool = False
    tile: int = 16
    splits: int = 1
    lag: float = 0.0
    broken: str = ""

    def store(self, x: Array, name: str | None) -> Array:
        return x if name is None else np.asarray(FORMATS[name].round(x).astype(self.wide))

    def dot(self, a: Array, b: Array) -> Array:
        """a [n, k] times b [k, m]."""
        a, b = self.store(a, self.operands), self.store(b, self.operands)
        terms = list(range(a.shape[1]))
        if self.order == "backward":
            terms.reverse()
        lanes = 4 if self.order == "lanes" else 1
        sums = []
        for lane in range(lanes):
            total = np.zeros((a.shape[0], b.shape[1]), self.wide)
            for k in terms[lane::lanes]:
                if self.order == "fused" and self.wide is np.float32:
                    exact = a[:, k : k + 1].astype(np.float64) * b[k].astype(np.float64)
                    total = (total.astype(np.float64) + exact).astype(np.float32)
                else:
                    total = total + a[:, k : k + 1] * b[k]
            sums.append(total)
        return sums[0] if lanes == 1 else (sums[0] + sums[1]) + (sums[2] + sums[3])


def run(
    kernel: Kernel, arrays: tuple[Array, ...], visible: Array, scale: float | None, output: str
) -> tuple[Array, Array]:
    """(out [r, d_v] rounded to ``output``, lse [r, 1]) of one head; ``arrays`` in the op's order."""
    with np.errstate(all="ignore"):
        q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (np.asarray(a).astype(kernel.wide) for a in arrays)
        if kernel.broken == "rope part omitted":
            q_pe = np.zeros_like(q_pe)
        if kernel.broken == "w_uv transposed":
            w_uv = w_uv[::-1]
        if scale is None:
            scale = 1 / np.sqrt(q_nope.shape[1] + (0 if kernel.broken == "scale from d_h" else q_pe.shape[1]))
        if kernel.form == "materialised":
            k_nope = kernel.store(kernel.dot(c_kv, w_uk.T), kernel.up)
            v = kernel.store(kernel.dot(c_kv, w_uv.T), kernel.up)
            q, k = np.hstack([q_nope, q_pe]), np.hstack([k_nope, k_pe])
        else:
            q = np.hstack([kernel.store(kernel.dot(q_nope, w_uk), kernel.up), q_pe])
            k, v = np.hstack([c_kv, k_pe]), c_kv
        exponents = _exponents(kernel, q, k, scale)
        out, lse = _attend(kernel, exponents, v, visible)
        if kernel.form == "absorbed":
            out = kernel.dot(kernel.store(out, kernel.latent), w_uv.T)
        return np.asarray(FORMATS[output].round(out)), lse


def _exponents(kernel: Kernel, q: Array, k: Array, scale: float) -> Array:
    factor = kernel.wide(scale)
    if kernel.prescaled:
        root = np.sqrt(np.abs(factor))
        scores, factor = kernel.dot(q * root, (k * root).T), kernel.wide(np.sign(scale))
    else:
        scores = kernel.dot(q, k.T)
    if kernel.stores is not None:
        scores = kernel.store(kernel.store(scores, kernel.stores) * factor, kernel.stores)
        factor = kernel.wide(1)
    if kernel.base_two:
        factor = factor * kernel.wide(np.log2(np.e))
    return np.asarray(scores * factor)


def _attend(kernel: Kernel, x: Array, v: Array, visible: Array) -> tuple[Array, Array]:
    power, log = (np.exp2, np.log2) if kernel.base_two else (np.exp, np.log)
    natural = kernel.wide(np.log(2)) if kernel.base_two else kernel.wide(1)
    if kernel.normalised:
        top = np.max(np.where(visible, x, -np.inf), axis=1, keepdims=True)
        shift = np.where(np.isfinite(top), top, 0).astype(x.dtype)
        p = np.where(visible, power(x - shift), 0).astype(kernel.wide)
        total = np.cumsum(p, axis=1, dtype=kernel.wide)[:, -1:]
        return kernel.dot(kernel.store(p / total, kernel.weights), v), (shift + log(total)) * natural
    parts = []
    edges = np.linspace(0, x.shape[1], kernel.splits + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        if start < stop:
            shift, total, acc = _online(kernel, x[:, start:stop], v[start:stop], visible[:, start:stop], power)
            parts.append((total > 0, acc / total, shift + log(total)))
    if kernel.splits == 1:
        return parts[0][1], parts[0][2] * natural
    logs = np.hstack([np.where(seen, part, -np.inf) for seen, _, part in parts]).astype(kernel.wide)
    top = logs.max(axis=1, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0).astype(kernel.wide)
    shares = power(logs - shift).astype(kernel.wide)
    total = np.cumsum(shares, axis=1, dtype=kernel.wide)[:, -1:]
    out = np.zeros((x.shape[0], v.shape[1]), kernel.wide)
    for index, (seen, piece, _) in enumerate(parts):
        out = out + np.where(seen, piece, 0) * (shares[:, index : index + 1] / total)
    return out, (shift + log(total)) * natural


def _online(kernel: Kernel, x: Array, v: Array, visible: Array, power: Any) -> tuple[Array, Array, Array]:
    """Running (maximum, row sum, accumulator) over tiles of keys."""
    wide, rows = kernel.wide, x.shape[0]
    top = np.full((rows, 1), -np.inf, wide)
    total, acc = np.zeros((rows, 1), wide), np.zeros((rows, v.shape[1]), wide)
    lag = kernel.lag * (np.log2(np.e) if kernel.base_two else 1.0)
    for start in range(0, x.shape[1], kernel.tile):
        part = visible[:, start : start + kernel.tile]
        tile = np.where(part, x[:, start : start + kernel.tile], -np.inf).astype(wide)
        new = np.maximum(top, tile.max(axis=1, keepdims=True))
        if lag:
            new = np.where(np.isfinite(top) & (new - top <= lag), top, new)
        shift = np.where(np.isfinite(new), new, 0).astype(wide)
        p = np.where(part, power(tile - shift), 0).astype(wide)
        rescale = np.where(np.isfinite(top), power(np.where(np.isfinite(top), top, 0).astype(wide) - shift), 0).astype(
            wide
        )
        cast = kernel.store(p, kernel.weights)
        summed = np.cumsum(cast if kernel.rounded_sum else p, axis=1, dtype=wide)[:, -1:]
        total, acc = total * rescale + summed, acc * rescale
        multiplied, values = (
            kernel.store(cast, kernel.operands),
            kernel.store(v[start : start + kernel.tile], kernel.operands),
        )
        for j in range(p.shape[1]):
            acc = acc + multiplied[:, j : j + 1] * values[j]
        top = new
    return top, total, acc
