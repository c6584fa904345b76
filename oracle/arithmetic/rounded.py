"""`rounded`: a model kernel. The same formula with every stage in the format that a contract names.

Arithmetic runs in the contract's ``compute`` format (float32 or float64, real hardware arithmetic), dot products and
sums are sequential in the accumulator's format, and `round` casts to the format of the named stage. This is the honest
kernel against which gate G3 compares a target's rms error; it proves nothing and bounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.formats import FORMATS, Float64Array, FloatArray, Format

Matrix = FloatArray
Rounding = Callable[[Matrix], Matrix]


@dataclass(frozen=True, slots=True)
class RoundedArithmetic:
    """`oracle.arithmetic.base.Arithmetic` in low precision; ``stages`` maps a stage name to its format.

    A stage that is not named keeps the compute format.
    """

    compute: Format
    stages: Mapping[str, Format] = field(default_factory=dict)
    name: str = "rounded"
    stacks: bool = True

    @property
    def angles(self) -> RoundedArithmetic:
        angle = self.stages.get("angle", self.compute)
        wide = FORMATS["fp64"] if angle.name == "fp64" else FORMATS["fp32"]
        return RoundedArithmetic(wide, {**self.stages, "table": self.stages.get("table", self.compute)})

    def working(self) -> AbstractContextManager[object]:
        return np.errstate(all="ignore")

    def _scalar_type(self) -> Any:
        return self.compute.dtype

    def const(self, x: ArrayLike) -> Matrix:
        return np.asarray(np.atleast_2d(np.asarray(x)).astype(np.float64).astype(self._scalar_type()))

    def rational(self, numerator: int, denominator: int) -> Matrix:
        return np.array([[numerator / denominator]], dtype=self._scalar_type())

    def add(self, a: Matrix, b: Matrix) -> Matrix:
        return np.asarray(a + b)

    def sub(self, a: Matrix, b: Matrix) -> Matrix:
        return np.asarray(a - b)

    def mul(self, a: Matrix, b: Matrix) -> Matrix:
        return np.asarray(a * b)

    def div(self, a: Matrix, b: Matrix) -> Matrix:
        return np.asarray(a / b)

    def matmul(self, a: Matrix, b: Matrix, stage: str) -> Matrix:
        rounding = self._narrow(stage)
        return _sequential(a, b) if rounding is None else _step_by_step(a, b, rounding)

    def transpose(self, a: Matrix) -> Matrix:
        return _turned(a)

    def exp(self, a: Matrix) -> Matrix:
        return np.asarray(np.exp(a))

    def log(self, a: Matrix) -> Matrix:
        return np.asarray(np.log(a))

    def tanh(self, a: Matrix) -> Matrix:
        return np.asarray(np.tanh(a))

    def sqrt(self, a: Matrix) -> Matrix:
        return np.asarray(np.sqrt(a))

    def row_max(self, a: Matrix, visible: NDArray[np.bool_]) -> Matrix:
        top = np.max(a, axis=-1, keepdims=True, where=np.broadcast_to(visible, a.shape), initial=-np.inf)
        return np.asarray(np.where(np.isneginf(top), self._scalar_type()(0), top))

    def maximum(self, a: Matrix, b: Matrix) -> Matrix:
        return np.maximum(a, b)

    def row_sum(self, a: Matrix, stage: str) -> Matrix:
        total = np.zeros((*a.shape[:-1], 1), dtype=self._scalar_type())
        rounding = self._narrow(stage)
        wide = self.stages.get(stage, self.compute)
        if wide.precision > self.compute.precision and a.shape[-1]:
            return np.cumsum(a.astype(wide.dtype), axis=-1)[..., -1:].astype(self._scalar_type())
        if rounding is None:
            # cumsum is the sequential sum (np.sum is pairwise).
            return np.ascontiguousarray(np.cumsum(a, axis=-1, dtype=a.dtype)[..., -1:]) if a.shape[-1] else total
        for k in range(a.shape[-1]):
            total = rounding(total + a[..., k : k + 1])
        return total

    def where(self, visible: NDArray[np.bool_], a: Matrix) -> Matrix:
        return np.where(visible, a, self._scalar_type()(0))

    def select(self, condition: NDArray[np.bool_], a: Matrix, b: Matrix) -> Matrix:
        return np.where(condition, a, b)

    def cos_sin(self, positions: NDArray[np.int64], frequencies: Matrix) -> tuple[Matrix, Matrix]:
        # `frequencies` come from `angles`, in the angle's own format; a narrow one rounds the position too.
        angles = self.angles
        whole = angles.round(np.asarray(positions)[:, None].astype(frequencies.dtype), "angle")
        angle = angles.round(whole * frequencies, "angle")
        cos, sin = (np.asarray(f(angle).astype(self._scalar_type())) for f in (np.cos, np.sin))
        return cos, sin

    def power(self, base: float, numerators: NDArray[np.int64], denominator: int) -> Matrix:
        # As transformers and the published code do: 1 / base^(-t), each step in the angle's format.
        t = -np.asarray(numerators).astype(self._scalar_type()) / self._scalar_type()(denominator)
        return np.asarray(self._scalar_type()(1) / self._scalar_type()(base) ** t[None, :])

    def pi(self) -> Matrix:
        return np.array([[np.pi]], dtype=self._scalar_type())

    def columns(self, a: Matrix, start: int, stop: int, step: int = 1) -> Matrix:
        return a[..., start:stop:step]

    def rows(self, a: Matrix, start: int, stop: int) -> Matrix:
        return a[..., start:stop, :]

    def hstack(self, parts: list[Matrix]) -> Matrix:
        return np.concatenate(parts, axis=-1)

    def round(self, a: Matrix, stage: str) -> Matrix:
        rounding = self._narrow(stage)
        return a if rounding is None else rounding(a)

    def _narrow(self, stage: str) -> Rounding | None:
        fmt = self.stages.get(stage, self.compute)
        if fmt.precision >= self.compute.precision:
            return None
        if self.compute.dtype is np.float32 and fmt.emin >= FORMATS["fp32"].emin:
            return partial(_rounded_single, fmt=fmt)
        return lambda x: np.asarray(fmt.round(x).astype(self._scalar_type()))

    def to_enclosure(self, a: Matrix) -> tuple[Float64Array, Float64Array, Float64Array]:
        mid = a.astype(np.float64)
        return mid, np.zeros_like(mid), np.zeros_like(mid)


def _sequential(a: Matrix, b: Matrix) -> Matrix:
    """a @ b, each entry its products summed one after another from the first, every product and sum rounded.

    einsum adds along the columns of ``b`` while it walks down its rows, which is that sum for each column. Where there
    is one column only it would add in another order, and where it fuses, products must be exact.
    """
    n, (k, m) = a.shape[-2], b.shape[-2:]
    if n == 1 == m:
        products = a * b.swapaxes(-1, -2)
        return np.asarray(np.cumsum(products, axis=-1)[..., -1:] if k else np.zeros((*a.shape[:-1], 1), a.dtype))
    if m < n:
        return _turned(_sequential(_turned(b), _turned(a)))
    if _fused(a.dtype.name) and not _products_are_exact(a, b):
        return _step_by_step(a, b, None)
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    total = np.empty((*a.shape[:-1], m), dtype=a.dtype)
    for start in range(0, m, _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        np.einsum("...ik,...kj->...ij", a, b[..., columns], out=total[..., columns])
    return total


def _turned(a: Matrix) -> Matrix:
    return np.ascontiguousarray(a.swapaxes(-1, -2))


# So many sums stay in the first cache.
_COLUMNS = 1024


@lru_cache
def _fused(dtype: str) -> bool:
    """Whether this numpy's einsum adds a product to a sum with one rounding."""
    x = np.full((1, 64), 1 + np.finfo(dtype).eps, dtype=dtype)
    total = np.einsum("ik,kj->ij", np.array([[1, x[0, 0]]] * 2, dtype=dtype), np.vstack([-x * x, x]))
    return bool(total.any())


def _products_are_exact(a: Matrix, b: Matrix) -> bool:
    """Whether no product of an entry of each is rounded, so that fusing it with a sum changes nothing."""
    kind = np.finfo(a.dtype)
    least = [float(np.abs(x, where=x != 0, out=np.ones_like(x)).min(initial=1.0)) for x in (a, b)]
    deep = least[0] * least[1] * 2.0**-kind.nmant <= float(kind.smallest_normal)
    return not deep and _significant_bits(a) + _significant_bits(b) <= kind.nmant + 1


def _significant_bits(x: Matrix) -> int:
    """Bits of the longest significand among normal numbers."""
    stored = int(np.finfo(x.dtype).nmant)
    seen = int(np.bitwise_or.reduce(x.view(f"u{x.itemsize}"), axis=None)) & ((1 << stored) - 1)
    return 1 + stored - (((seen & -seen).bit_length() - 1) if seen else stored)


def _step_by_step(a: Matrix, b: Matrix, rounding: Rounding | None) -> Matrix:
    """The same, with the running sums rounded once more by ``rounding``."""
    if b.shape[-1] < a.shape[-2]:
        return _turned(_step_by_step(_turned(b), _turned(a), rounding))
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    scratch = np.empty_like(total)
    across = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., None]
    for column, row in zip(across, np.ascontiguousarray(np.moveaxis(b, -2, 0)), strict=True):
        np.multiply(column, row[..., None, :], out=scratch)
        total += scratch
        if rounding is not None:
            total = rounding(total)
    return total


def _rounded_single(x: Matrix, *, fmt: Format) -> Matrix:
    """`Format.round` of float32 numbers to a format of which float32 holds every number, as float32."""
    bits = x.view(np.uint32)
    if fmt.emin == FORMATS["fp32"].emin:
        # The same exponents: cut the last bits off, after half of their unit (less, if that leaves the last bit odd).
        cut = 24 - fmt.precision
        made = bits + (np.uint32((1 << cut - 1) - 1) + ((bits >> np.uint32(cut)) & np.uint32(1)))
        made = (made & np.uint32(0xFFFFFFFF << cut & 0xFFFFFFFF)).view(np.float32)
        return np.where(np.isnan(x), x, made) if np.isnan(x.sum()) else made
    # As in `Format.round`, of numbers that are far from overflow.
    if not float(np.abs(x).max(initial=0.0)) <= min(fmt.max_finite, 2.0**100):
        return np.asarray(fmt.round(x).astype(np.float32))
    binade = (bits & np.uint32(0x7F800000)).view(np.float32)
    anchor = np.maximum(binade, np.float32(fmt.smallest_normal)) * np.float32(1.5 * 2.0 ** (24 - fmt.precision))
    return np.asarray(np.copysign((x + anchor) - anchor, x))
