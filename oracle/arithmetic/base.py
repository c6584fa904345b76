"""The protocol that every formula is written over.

Values are two-dimensional ``[rows, columns]`` (one head at a time) and opaque to the formulas. Row results
(`row_max`, `row_sum`) have shape ``[rows, 1]`` and broadcast in the element-wise operations. Visibility is a
boolean numpy array, never an added -inf: excluded entries are never read, so their content cannot matter.

``stage`` names a point at which a low-precision kernel rounds or the place where a sum is accumulated; the exact
arithmetics ignore it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from oracle.formats import Float64Array

Value = Any


class Arithmetic(Protocol):
    """Operations of one number system on matrices. Implementations: mp, arb, ball, rounded."""

    @property
    def name(self) -> str: ...

    @property
    def angles(self) -> Arithmetic:
        """The arithmetic in which rotary frequencies are computed (more precise than balls where that is needed)."""

    def working(self) -> AbstractContextManager[Any]:
        """The context in which the operations run (precision, floating-point warnings); restored on exit."""

    def const(self, x: Any) -> Value:
        """An exact matrix from stored numbers (any numpy float array; float64 holds them all)."""

    def rational(self, numerator: int, denominator: int) -> Value:
        """The exact number numerator/denominator as a 1 x 1 matrix."""

    def add(self, a: Value, b: Value) -> Value: ...

    def sub(self, a: Value, b: Value) -> Value: ...

    def mul(self, a: Value, b: Value) -> Value: ...

    def div(self, a: Value, b: Value) -> Value: ...

    def matmul(self, a: Value, b: Value, stage: str) -> Value:
        """[n, k] times [k, m]; ``stage`` names the accumulator."""

    def transpose(self, a: Value) -> Value: ...

    def exp(self, a: Value) -> Value: ...

    def log(self, a: Value) -> Value: ...

    def tanh(self, a: Value) -> Value: ...

    def sqrt(self, a: Value) -> Value: ...

    def row_max(self, a: Value, visible: NDArray[Any]) -> Value:
        """Per row, an exact number near the largest visible entry (that of the midpoints: any shift is exact)."""

    def maximum(self, a: Value, b: Value) -> Value:
        """Element-wise, of two exact shifts."""

    def row_sum(self, a: Value, stage: str) -> Value: ...

    def where(self, visible: NDArray[Any], a: Value) -> Value:
        """``a`` where visible, exact zero elsewhere."""

    def select(self, condition: NDArray[Any], a: Value, b: Value) -> Value:
        """``a`` where the condition holds, ``b`` elsewhere; no rounding."""

    def cos_sin(self, positions: NDArray[Any], frequencies: Value) -> tuple[Value, Value]:
        """cos and sin of position x frequency: positions int64 [S], frequencies [1, d/2]; both [S, d/2]."""

    def power(self, base: float, numerators: NDArray[Any], denominator: int) -> Value:
        """base^(numerator/denominator) as a [1, n] row, for integer numerators."""

    def pi(self) -> Value:
        """pi as a 1 x 1 matrix."""

    def columns(self, a: Value, start: int, stop: int, step: int = 1) -> Value: ...

    def rows(self, a: Value, start: int, stop: int) -> Value: ...

    def hstack(self, parts: list[Value]) -> Value: ...

    def round(self, a: Value, stage: str) -> Value:
        """Round to the contract's format of this stage; identity in the exact arithmetics."""

    def to_enclosure(self, a: Value) -> tuple[Float64Array, Float64Array, Float64Array]:
        """(hi, lo, rad): midpoint hi + lo and a radius such that every exact entry lies within."""
