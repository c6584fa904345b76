"""An enclosure: a proven interval for every element of an array. The value, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from oracle.formats import Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Enclosure:
    """Intervals: the exact value lies in hi + lo +- rad. Arrays of one shape; rad is inf where nothing is known."""

    hi: Float64Array
    lo: Float64Array
    rad: Float64Array

    def upper_abs(self) -> Float64Array:
        """An upper bound of the exact magnitude."""
        with np.errstate(over="ignore"):
            size = np.abs(self.hi)
            if any(self.lo.strides) or self.lo.any():
                size += np.abs(self.lo)
            size += self.rad
            size *= 1 + 2.0**-50
            return np.asarray(size)

    def distance(self, y: ArrayLike) -> Float64Array:
        """|y - (hi + lo)| in float64, rounded up by less than 2^-50 of itself. ``y`` float64 values; nan stays nan."""
        with np.errstate(invalid="ignore", over="ignore"):
            # y - hi is exact when y and hi are close (Sterbenz); otherwise lo does not matter at this accuracy.
            return np.asarray(np.abs((np.asarray(y, dtype=np.float64) - self.hi) - self.lo))

    def parts(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        return self.hi, self.lo, self.rad

    def rows(self, index: Any) -> Enclosure:
        return Enclosure(self.hi[index], self.lo[index], self.rad[index])
