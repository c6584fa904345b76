"""The arithmetic of honest attention kernels: what each of them leaves open, and the rounding of every step.

Shares no code with the oracle but the rounding to a format.
"""

from __future__ import annotations

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
    tanh: how a soft cap is made (`honest_options`); tanh_error: relative, where it is ``approximate``. alibi:
    ``distance``, ``folded`` (slope log2 e first) or ``key index``. sink: ``first`` (running maximum and sum start with
    it), ``last``, ``outside`` (the maximum), ``sigmoid``, ``sigmoid stored`` (of a stored O), ``late`` (in the
    merge); dishonest: ``dropped``, ``each split``. shifted: S - m is stored.
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
    tanh: str = "numpy"
    tanh_error: float = 2.0**-11
    alibi: str = "distance"
    sink: str = "first"
    shifted: bool = False


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
