"""Matrix arithmetic over an exact scalar type held in numpy object arrays: what `mp` and `arb` share.

Only the scalar functions differ between the two, so one class takes them as fields. Values are object arrays
``[rows, columns]``; numpy's element-wise operators call the scalars' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.formats import Float64Array

Objects = NDArray[np.object_]


class Scalar(Protocol):
    """An exact number; numpy calls its operators."""

    def __lt__(self, other: Self, /) -> bool: ...

    def __add__(self, other: Self, /) -> Self: ...

    def __mul__(self, other: Self, /) -> Self: ...


S = TypeVar("S", bound=Scalar)


@dataclass(frozen=True, slots=True)
class Scalars(Generic[S]):
    """The functions of one scalar type. ``midpoint`` returns an exact scalar; ``split`` gives (hi, lo, rad).

    ``quotient`` by zero (a row without visible keys) is nan, not an exception.
    """

    number: Callable[[float], S]
    fraction: Callable[[int, int], S]
    quotient: Callable[[S, S], S]
    exp: Callable[[S], S]
    log: Callable[[S], S]
    tanh: Callable[[S], S]
    sqrt: Callable[[S], S]
    cos: Callable[[S], S]
    sin: Callable[[S], S]
    pi: Callable[[], S]
    midpoint: Callable[[S], S]
    split: Callable[[S], tuple[float, float, float]]
    product: Callable[[Objects, Objects], Objects]
    working: Callable[[], AbstractContextManager[object]]


def objects(values: Iterable[object], shape: tuple[int, ...]) -> Objects:
    """An object array of this shape from its entries in order."""
    return np.fromiter(values, dtype=object).reshape(shape)


def _entries(a: Objects) -> list[Any]:
    return list(a.flat)


def _each(function: Callable[[S], S], a: Objects) -> Objects:
    return objects((function(x) for x in _entries(a)), a.shape)


@dataclass(frozen=True, slots=True)
class ScalarArithmetic(Generic[S]):
    """`oracle.arithmetic.base.Arithmetic` over exact scalars; every method runs at the scalars' own precision."""

    name: str
    precision: int
    scalars: Scalars[S]

    @property
    def stacks(self) -> bool:
        return False

    @property
    def angles(self) -> ScalarArithmetic[S]:
        return self

    def working(self) -> AbstractContextManager[object]:
        return self.scalars.working()

    def const(self, x: ArrayLike) -> Objects:
        values = np.atleast_2d(np.asarray(x)).astype(np.float64)
        return objects((self.scalars.number(float(v)) for v in values.flat), values.shape)

    def rational(self, numerator: int, denominator: int) -> Objects:
        out = np.empty((1, 1), dtype=object)
        out[0, 0] = self.scalars.fraction(numerator, denominator)
        return out

    def add(self, a: Objects, b: Objects) -> Objects:
        return np.asarray(a + b)

    def sub(self, a: Objects, b: Objects) -> Objects:
        return np.asarray(a - b)

    def mul(self, a: Objects, b: Objects) -> Objects:
        return np.asarray(a * b)

    def div(self, a: Objects, b: Objects) -> Objects:
        return np.asarray(np.frompyfunc(self.scalars.quotient, 2, 1)(a, b))

    def matmul(self, a: Objects, b: Objects, stage: str) -> Objects:
        return self.scalars.product(a, b)

    def transpose(self, a: Objects) -> Objects:
        return a.T

    def exp(self, a: Objects) -> Objects:
        return _each(self.scalars.exp, a)

    def log(self, a: Objects) -> Objects:
        return _each(self.scalars.log, a)

    def tanh(self, a: Objects) -> Objects:
        return _each(self.scalars.tanh, a)

    def sqrt(self, a: Objects) -> Objects:
        return _each(self.scalars.sqrt, a)

    def row_max(self, a: Objects, visible: NDArray[np.bool_]) -> Objects:
        visible = np.broadcast_to(visible, a.shape)
        out = np.empty((a.shape[0], 1), dtype=object)
        for i in range(a.shape[0]):
            seen = [self.scalars.midpoint(x) for x in a[i][visible[i]]]
            out[i, 0] = max(seen) if seen else self.scalars.number(0.0)
        return out

    def maximum(self, a: Objects, b: Objects) -> Objects:
        midpoint = self.scalars.midpoint
        a, b = np.broadcast_arrays(a, b)
        return objects((max(midpoint(x), midpoint(y)) for x, y in zip(_entries(a), _entries(b), strict=True)), a.shape)

    def row_sum(self, a: Objects, stage: str) -> Objects:
        out = np.empty((a.shape[0], 1), dtype=object)
        for i in range(a.shape[0]):
            out[i, 0] = sum(_entries(a[i]), self.scalars.number(0.0))
        return out

    def where(self, visible: NDArray[np.bool_], a: Objects) -> Objects:
        return np.where(np.broadcast_to(visible, a.shape), a, objects((self.scalars.number(0.0),), (1, 1)))

    def select(self, condition: NDArray[np.bool_], a: Objects, b: Objects) -> Objects:
        return np.where(condition, a, b)

    def cos_sin(self, positions: NDArray[np.int64], frequencies: Objects) -> tuple[Objects, Objects]:
        whole = objects((self.scalars.fraction(int(p), 1) for p in positions), (len(positions), 1))
        angle = self.mul(whole, frequencies)
        return _each(self.scalars.cos, angle), _each(self.scalars.sin, angle)

    def power(self, base: float, numerators: NDArray[np.int64], denominator: int) -> Objects:
        log_base = self.scalars.log(self.scalars.number(float(base)))
        exponents = (log_base * self.scalars.fraction(int(n), denominator) for n in numerators)
        return objects((self.scalars.exp(x) for x in exponents), (1, len(numerators)))

    def pi(self) -> Objects:
        return objects((self.scalars.pi(),), (1, 1))

    def columns(self, a: Objects, start: int, stop: int, step: int = 1) -> Objects:
        return a[:, start:stop:step]

    def rows(self, a: Objects, start: int, stop: int) -> Objects:
        return a[start:stop]

    def hstack(self, parts: list[Objects]) -> Objects:
        return np.hstack(parts)

    def round(self, a: Objects, stage: str) -> Objects:
        return a

    def to_enclosure(self, a: Objects) -> tuple[Float64Array, Float64Array, Float64Array]:
        split = np.array([self.scalars.split(x) for x in _entries(a)], dtype=np.float64).reshape(*a.shape, 3)
        return split[..., 0], split[..., 1], split[..., 2]
