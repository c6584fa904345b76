"""Attention as FP8 hardware computes it: a truncating matrix engine, P scaled before its cast, stored factors.

Shares nothing with the oracle but the rounding to a format. q [Sq, D], k [Sk, D], v [Sk, Dv] hold stored numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS

Array = NDArray[Any]
LOG2_E = np.float32(1.4426950408889634)


@dataclass(frozen=True)
class Fp8Kernel:
    """step, fraction, result: products a step of the engine, fraction bits it keeps of each, bits of its result; None:
    a sequential float32 chain. promote: every tile has fresh sums of P V and of P, added in float32. factor: that of P
    before its cast to ``weights``. dequantise: q, k, v are multiplied by their factors first, in float32.
    """

    engine: tuple[int, int, int] | None = (32, 13, 13)
    weights: str = "e4m3"
    factor: float = 256.0
    tile: int = 64
    promote: bool = False
    normalised: bool = False
    rounded_sum: bool = False
    dequantise: bool = False
    saturate: bool = False


def engine_dot(a: Array, b: Array, start: Array, how: tuple[int, int, int] | None) -> Array:
    """start + a [n, k] b [k, m] in float32, by ``how``."""
    total = start.astype(np.float32)
    if how is None:
        for i in range(a.shape[1]):
            total = total + (a[:, i, None] * b[None, i]).astype(np.float32)
        return total
    step, fraction, result = how
    for begin in range(0, a.shape[1], step):
        products = a[:, begin : begin + step, None].astype(np.float64) * b[None, begin : begin + step]
        addends = np.concatenate([total[:, None].astype(np.float64), products], axis=1)
        # Aligned to the largest exponent, cut to its grid, summed exactly, cut again.
        _, top = np.frexp(np.abs(addends).max(axis=1, keepdims=True))
        quantum = np.ldexp(1.0, top - 1 - fraction)
        exact = (np.trunc(addends / quantum) * quantum).sum(axis=1)
        _, own = np.frexp(exact)
        grid = np.ldexp(1.0, own - 1 - result)
        total = (np.trunc(exact / grid) * grid).astype(np.float32)
    return total


def run_fp8(
    kernel: Fp8Kernel, q: Array, k: Array, v: Array, *, alpha: float, factors: tuple[float, float, float], output: str
) -> tuple[Array, Array]:
    """O [Sq, Dv] in ``output`` and L [Sq, 1] in float32."""
    q, k, v = (np.asarray(a, np.float32) for a in (q, k, v))
    fq, fk, fv = (np.float32(f) for f in factors)
    if kernel.dequantise:
        q, k, v = q * fq, k * fk, v * fv
        fq = fk = fv = np.float32(1)
    scale = np.float32(alpha) * (fq * fk) * LOG2_E
    narrow = FORMATS[kernel.weights]
    rows, factor = len(q), np.float32(kernel.factor)
    top, total = np.full((rows, 1), -np.inf, np.float32), np.zeros((rows, 1), np.float32)
    acc = np.zeros((rows, v.shape[1]), np.float32)

    def scores(start: int) -> Array:
        keys = k[start : start + kernel.tile]
        return engine_dot(q, keys.T, np.zeros((rows, len(keys)), np.float32), kernel.engine)

    def cast(p: Array) -> Array:
        scaled = p * factor
        return narrow.round(scaled, saturate=kernel.saturate).astype(np.float32)

    def gathered(acc: Array, p: Array, start: int) -> Array:
        values = v[start : start + kernel.tile]
        if kernel.promote:
            return acc + engine_dot(p, values, np.zeros_like(acc), kernel.engine)
        return engine_dot(p, values, acc, kernel.engine)

    with np.errstate(all="ignore"):
        for start in range(0, len(k), kernel.tile):
            t = scores(start)
            new = np.maximum(top, t.max(axis=1, keepdims=True))
            p = np.exp2(t * scale - new * scale)
            drop = np.where(np.isneginf(top), np.float32(0), np.exp2((top - new) * scale))
            held = cast(p)
            terms = held / factor if kernel.rounded_sum else p
            total = total * drop
            own = np.zeros_like(total) if kernel.promote else total
            for j in range(p.shape[1]):
                own = own + terms[:, j : j + 1]
            total = total + own if kernel.promote else own
            if not kernel.normalised:
                acc = gathered(acc * drop, held, start)
            top = new
        if kernel.normalised:
            for start in range(0, len(k), kernel.tile):
                held = cast(np.exp2(scores(start) * scale - top * scale) / total)
                acc = gathered(acc, held, start)
            out = acc * (fv / factor)
        else:
            out = acc * ((np.float32(1) / total) * (fv / factor))
        lse = (top * scale + np.log2(total)) * np.float32(0.6931471805599453)
    return FORMATS[output].round(out, saturate=kernel.saturate), lse.astype(np.float64)
