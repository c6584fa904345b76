"""The protocol that every formula is written over.

Values are matrices ``[rows, columns]`` of one head and opaque to the formulas; where an arithmetic ``stacks``, of
several heads at once ``[heads, rows, columns]``. Row results (`row_max`, `row_sum`) have one column and broadcast in
the element-wise operations. Visibility is a boolean numpy array, never an added -inf: excluded entries are never read,
so their content cannot matter.

``stage`` names a point at which a low-precision kernel rounds or the place where a sum is accumulated; the exact
arithmetics ignore it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.formats import Float64Array

V = TypeVar("V")
"""The values of one arithmetic: Arb matrices, balls, arrays. Formulas know nothing else about them."""


class Arithmetic(Protocol[V]):
    """Operations of one number system on matrices. Implementations: mp, arb, ball, rounded."""

    @property
    def name(self) -> str: ...

    @property
    def stacks(self) -> bool:
        """Whether values may be those of several heads."""

    @property
    def angles(self) -> Arithmetic[Any]:
        """The arithmetic in which rotary frequencies are computed: with values of its own, more precise than balls."""

    def working(self) -> AbstractContextManager[object]:
        """The context in which the operations run (precision, floating-point warnings); restored on exit."""

    def const(self, x: ArrayLike) -> V:
        """An exact matrix from stored numbers (any numpy float array; float64 holds them all)."""

    def rational(self, numerator: int, denominator: int) -> V:
        """The exact number numerator/denominator as a 1 x 1 matrix."""

    def add(self, a: V, b: V) -> V: ...

    def sub(self, a: V, b: V) -> V: ...

    def mul(self, a: V, b: V) -> V: ...

    def div(self, a: V, b: V) -> V: ...

    def matmul(self, a: V, b: V, stage: str) -> V:
        """[n, k] times [k, m]; ``stage`` names the accumulator."""

    def transpose(self, a: V) -> V: ...

    def exp(self, a: V) -> V: ...

    def log(self, a: V) -> V: ...

    def tanh(self, a: V) -> V: ...

    def sqrt(self, a: V) -> V: ...

    def row_max(self, a: V, visible: NDArray[np.bool_]) -> V:
        """Per row, an exact number near the largest visible entry (that of the midpoints: any shift is exact)."""

    def maximum(self, a: V, b: V) -> V:
        """Element-wise, of two exact shifts."""

    def row_sum(self, a: V, stage: str) -> V: ...

    def where(self, visible: NDArray[np.bool_], a: V) -> V:
        """``a`` where visible, exact zero elsewhere."""

    def select(self, condition: NDArray[np.bool_], a: V, b: V) -> V:
        """``a`` where the condition holds, ``b`` elsewhere; no rounding."""

    def cos_sin(self, positions: NDArray[np.int64], frequencies: Any) -> tuple[V, V]:
        """cos and sin of position x frequency: positions int64 [S], frequencies [1, d/2] of `angles`; both [S, d/2]."""

    def power(self, base: float, numerators: NDArray[np.int64], denominator: int) -> Any:
        """base^(numerator/denominator) as a [1, n] row of `angles`, for integer numerators."""

    def pi(self) -> V:
        """pi as a 1 x 1 matrix."""

    def columns(self, a: V, start: int, stop: int, step: int = 1) -> V: ...

    def rows(self, a: V, start: int, stop: int) -> V: ...

    def hstack(self, parts: list[V]) -> V: ...

    def round(self, a: V, stage: str) -> V:
        """Round to the contract's format of this stage; identity in the exact arithmetics."""

    def to_enclosure(self, a: V) -> tuple[Float64Array, Float64Array, Float64Array]:
        """(hi, lo, rad): midpoint hi + lo and a radius such that every exact entry lies within."""
