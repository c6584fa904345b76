"""`rounded`: a model kernel. The same formula with every stage in the format that a contract names.

Arithmetic runs in the contract's ``compute`` format (float32 or float64, real hardware arithmetic), dot products and
sums are sequential in the accumulator's format, and `round` casts to the format of the named stage. This is the honest
kernel against which gate G3 compares a target's rms error; it proves nothing and bounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, Float64Array, Format

Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True)
class RoundedArithmetic:
    """`oracle.arithmetic.base.Arithmetic` in low precision; ``stages`` maps a stage name to its format.

    A stage that is not named keeps the compute format.
    """

    compute: Format
    stages: Mapping[str, Format] = field(default_factory=dict)
    name: str = "rounded"

    @property
    def angles(self) -> RoundedArithmetic:
        angle = self.stages.get("angle", self.compute)
        wide = FORMATS["fp64"] if angle.name == "fp64" else FORMATS["fp32"]
        return RoundedArithmetic(wide, {**self.stages, "table": self.stages.get("table", self.compute)})

    def working(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def _scalar_type(self) -> Any:
        return self.compute.dtype

    def const(self, x: Any) -> Matrix:
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
        total = np.zeros((a.shape[0], b.shape[1]), dtype=self._scalar_type())
        scratch = np.empty_like(total)
        columns = np.ascontiguousarray(a.T)
        rounding = self._narrow(stage)
        for k in range(a.shape[1]):
            np.multiply(columns[k][:, None], b[k][None, :], out=scratch)
            total += scratch
            if rounding is not None:
                total = rounding(total)
        return total

    def transpose(self, a: Matrix) -> Matrix:
        return np.ascontiguousarray(a.T)

    def exp(self, a: Matrix) -> Matrix:
        return np.asarray(np.exp(a))

    def log(self, a: Matrix) -> Matrix:
        return np.asarray(np.log(a))

    def tanh(self, a: Matrix) -> Matrix:
        return np.asarray(np.tanh(a))

    def sqrt(self, a: Matrix) -> Matrix:
        return np.asarray(np.sqrt(a))

    def row_max(self, a: Matrix, visible: NDArray[Any]) -> Matrix:
        top = np.max(a, axis=1, keepdims=True, where=np.broadcast_to(visible, a.shape), initial=-np.inf)
        return np.asarray(np.where(np.isneginf(top), self._scalar_type()(0), top))

    def maximum(self, a: Matrix, b: Matrix) -> Matrix:
        return np.maximum(a, b)

    def row_sum(self, a: Matrix, stage: str) -> Matrix:
        total = np.zeros((a.shape[0], 1), dtype=self._scalar_type())
        rounding = self._narrow(stage)
        wide = self.stages.get(stage, self.compute)
        if wide.precision > self.compute.precision and a.shape[1]:
            return np.cumsum(a.astype(wide.dtype), axis=1)[:, -1:].astype(self._scalar_type())
        if rounding is None:
            # cumsum is the sequential sum (np.sum is pairwise).
            return np.ascontiguousarray(np.cumsum(a, axis=1, dtype=a.dtype)[:, -1:]) if a.shape[1] else total
        for k in range(a.shape[1]):
            total = rounding(total + a[:, k : k + 1])
        return total

    def where(self, visible: NDArray[Any], a: Matrix) -> Matrix:
        return np.where(visible, a, self._scalar_type()(0))

    def select(self, condition: NDArray[Any], a: Matrix, b: Matrix) -> Matrix:
        return np.where(condition, a, b)

    def cos_sin(self, positions: NDArray[Any], frequencies: Matrix) -> tuple[Matrix, Matrix]:
        # `frequencies` come from `angles`, in the angle's own format; a narrow one rounds the position too.
        angles = self.angles
        whole = angles.round(np.asarray(positions)[:, None].astype(frequencies.dtype), "angle")
        angle = angles.round(whole * frequencies, "angle")
        cos, sin = (np.asarray(f(angle).astype(self._scalar_type())) for f in (np.cos, np.sin))
        return cos, sin

    def power(self, base: float, numerators: NDArray[Any], denominator: int) -> Matrix:
        # As transformers and the published code do: 1 / base^(-t), each step in the angle's format.
        t = -np.asarray(numerators).astype(self._scalar_type()) / self._scalar_type()(denominator)
        return np.asarray(self._scalar_type()(1) / self._scalar_type()(base) ** t[None, :])

    def pi(self) -> Matrix:
        return np.array([[np.pi]], dtype=self._scalar_type())

    def columns(self, a: Matrix, start: int, stop: int, step: int = 1) -> Matrix:
        return a[:, start:stop:step]

    def rows(self, a: Matrix, start: int, stop: int) -> Matrix:
        return a[start:stop]

    def hstack(self, parts: list[Matrix]) -> Matrix:
        return np.hstack(parts)

    def round(self, a: Matrix, stage: str) -> Matrix:
        rounding = self._narrow(stage)
        return a if rounding is None else rounding(a)

    def _narrow(self, stage: str) -> Any:
        fmt = self.stages.get(stage, self.compute)
        if fmt.precision >= self.compute.precision:
            return None

        def rounding(x: Matrix) -> Matrix:
            return np.asarray(fmt.round(x).astype(self._scalar_type()))

        return rounding

    def to_enclosure(self, a: Matrix) -> tuple[Float64Array, Float64Array, Float64Array]:
        mid = a.astype(np.float64)
        return mid, np.zeros_like(mid), np.zeros_like(mid)
