"""Honest softmax kernels and the rows they are tried on: what a bound must never reject.

A kernel computes every operation in one format, as a kernel of that format would (a fused multiply-add
rounds once). Some have an exponential function whose errors sit at the limit of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import Format


@dataclass(frozen=True)
class Kernel:
    """An honest kernel: how it forms exponents and sums, whether from L, how bad its exp may be."""

    exponent: str
    order: str
    from_lse: bool
    exp_error: float
    reciprocal: bool = False

    @property
    def form(self) -> str:
        if self.from_lse:
            return "from lse"
        return {"natural": "natural", "scaled": "scaled", "mixed": "scaled"}.get(self.exponent, "exp2")


KERNELS = [
    *(
        Kernel("natural", order, False, 0.0)
        for order in ("forward", "backward", "pairs", "lanes", "ascending", "online")
    ),
    Kernel("natural", "forward", False, 0.9, reciprocal=True),
    Kernel("natural", "online", False, 0.9),
    Kernel("shift first", "lanes", False, 0.9, reciprocal=True),
    Kernel("shift first", "forward", False, 0.0),
    Kernel("fused", "online", False, 0.9),
    Kernel("fused", "forward", False, 0.0),
    Kernel("scaled", "forward", False, 0.9),
    Kernel("scaled", "backward", False, 0.0),
    Kernel("mixed", "online", False, 0.0),
    Kernel("natural", "wide", False, 0.0),
    Kernel("shift first", "wide", False, 0.9),
    Kernel("shift first", "wide", True, 0.9),
    Kernel("shift first", "pairs", True, 0.9),
    Kernel("fused", "forward", True, 0.0),
]


def row_sum(terms: NDArray[Any], order: str) -> NDArray[Any]:
    """[R, n] -> [R, 1] in the dtype of the terms, by additions of two numbers in the given order.

    ``wide`` sums in float32 and rounds once, as calls on 16-bit tensors do.
    """
    if order == "wide":
        return row_sum(terms.astype(np.float32), "forward").astype(terms.dtype)
    if order == "ascending":
        terms = np.sort(terms, axis=1)
    if order == "backward":
        terms = terms[:, ::-1]
    if order == "lanes":
        width = min(4, terms.shape[1])
        pad = -terms.shape[1] % width
        terms = np.concatenate([terms, np.zeros((len(terms), pad), terms.dtype)], axis=1)
        lanes = [row_sum(terms[:, k::width], "forward") for k in range(width)]
        terms = np.concatenate(lanes, axis=1)
    if order == "pairs":
        while terms.shape[1] > 1:
            if terms.shape[1] % 2:
                terms = np.concatenate([terms, np.zeros((len(terms), 1), terms.dtype)], axis=1)
            terms = terms[:, ::2] + terms[:, 1::2]
        return terms
    total = np.zeros((len(terms), 1), terms.dtype)
    for k in range(terms.shape[1]):
        total = total + terms[:, k : k + 1]
    return total


def multiply_subtract(a: NDArray[Any], b: Any, c: NDArray[Any]) -> NDArray[np.float64]:
    """a b - c with one float64 rounding at the end: Dekker's product keeps the whole of a b."""
    x, y = a.astype(np.float64), np.float64(b)
    high_x, high_y = (v * 134217729.0 - (v * 134217729.0 - v) for v in (x, y))
    product = x * y
    rest = ((high_x * high_y - product) + high_x * (y - high_y) + (x - high_x) * high_y) + (x - high_x) * (y - high_y)
    return np.where(np.isfinite(x), (product - c.astype(np.float64)) + rest, product)


def run_kernel(kernel: Kernel, x: NDArray[Any], compute: Format, seed: int) -> dict[str, NDArray[Any]]:
    """p, ln p and L in the compute format's dtype, every operation rounded to it (a fused one once)."""
    rng = np.random.default_rng(seed)
    dtype = compute.dtype
    log2e, ln2 = dtype(1.4426950408889634), dtype(0.6931471805599453)
    xs = x.astype(dtype)

    def rounded(a: NDArray[Any]) -> NDArray[Any]:
        return compute.round(a).astype(dtype)

    def exp(a: NDArray[Any], *, two: bool) -> NDArray[Any]:
        wide = a.astype(np.float64)
        exact = np.exp2(wide) if two else np.exp(wide)
        # A function unit at its limit: up to exp_error of the contract's 4u, one of which the rounding takes.
        error = max(kernel.exp_error * 4 - 1, 0.0) * compute.unit_roundoff
        return rounded(np.where(wide == 0, 1.0, exact * (1 + rng.choice([-error, error], size=a.shape))))

    def weight(a: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
        if kernel.exponent == "natural":
            return exp(a - shift, two=False)
        if kernel.exponent == "shift first":
            return exp((a - shift) * log2e, two=True)
        if kernel.exponent in ("fused", "mixed"):
            return exp(rounded(multiply_subtract(a, log2e, shift * log2e)), two=True)
        return exp(a * log2e - shift * log2e, two=True)

    def rescale(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        if kernel.exponent == "fused":
            return exp(old * log2e - new * log2e, two=True)
        if kernel.exponent == "mixed":
            return exp((old - new) * log2e, two=True)
        return weight(old, new)

    with np.errstate(all="ignore"):
        top = xs.max(axis=1, keepdims=True)
        weights = weight(xs, top)
        if kernel.order == "online":
            total, running = np.zeros_like(top), np.full_like(top, -np.inf)
            for start in range(0, xs.shape[1], 16):
                tile = xs[:, start : start + 16]
                new = np.maximum(tile.max(axis=1, keepdims=True), running)
                if start:
                    total = total * rescale(running, new)
                total = total + row_sum(weight(tile, new), "forward")
                running = new
        else:
            total = row_sum(weights, kernel.order)
        wide = total.astype(np.float64)
        log_total = rounded(np.log(wide))
        lse = top + log_total
        if kernel.exponent == "shift first":
            lse = top + rounded(np.log2(wide)) * ln2
        elif kernel.exponent != "natural":
            lse = (top * log2e + rounded(np.log2(wide))) * ln2
        if kernel.from_lse:
            log_p = xs - lse
            p = exp(log_p * log2e, two=True)
        else:
            # Where exponents use M and the logarithm uses m, both stand-ins of one shift meet in ln p.
            log_p = (xs - top) - log_total
            p = weights * (dtype(1) / total) if kernel.reciprocal else weights / total
    return {"softmax": p, "log_softmax": log_p, "logsumexp": lse}


FAMILIES: dict[str, Callable[[np.random.Generator, int, Format], NDArray[np.float64]]] = {
    "normal": lambda rng, n, f: rng.standard_normal((4, n)),
    "wide": lambda rng, n, f: rng.standard_normal((4, n)) * 30,
    "ties": lambda rng, n, f: np.repeat(rng.standard_normal((4, 1)), n, axis=1),
    "ties of the maximum": lambda rng, n, f: np.minimum(rng.standard_normal((4, n)), 0.5) * rng.uniform(1, 9),
    "offset": lambda rng, n, f: (
        rng.standard_normal((4, n)) + rng.choice([-1, 1]) * min(10 ** rng.uniform(1, 7), f.max_finite / 4)
    ),
    "huge range": lambda rng, n, f: rng.uniform(-1, 1, (4, n)) * min(10 ** rng.uniform(2, 8), f.max_finite / 2),
    "near overflow": lambda rng, n, f: rng.uniform(-1, 1, (4, n)) * f.max_finite * 0.6,
    "subnormal": lambda rng, n, f: rng.integers(-40, 40, (4, n)) * f.smallest_subnormal,
    "tail mass": lambda rng, n, f: np.where(
        np.arange(n) == n // 2, 0.0, -rng.uniform(2, 14) - rng.uniform(0, 1e-2, (4, n))
    ),
    "underflow": lambda rng, n, f: np.where(rng.uniform(size=(4, n)) < 0.3, 0.0, -rng.uniform(5, 110, (4, n))),
    "growing": lambda rng, n, f: np.sort(rng.standard_normal((4, n)), axis=1) * rng.uniform(1, 40),
    "falling": lambda rng, n, f: -np.sort(rng.standard_normal((4, n)), axis=1) * rng.uniform(1, 40),
    "masked": lambda rng, n, f: np.where(rng.uniform(size=(4, n)) < 0.4, -np.inf, rng.standard_normal((4, n)) * 4),
}
