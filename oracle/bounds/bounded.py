"""What every bound returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.formats import Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """For one output of one block: the largest legal |error| per element, and where a non-finite value is legal.

    bound [r, c] float64, >= 0; inf or nan where nothing is promised. may_overflow [r, c]: the contract's own
    arithmetic may overflow there, so that inf or nan is no defect (counted as EXEMPT, never as PASS).
    """

    bound: Float64Array
    may_overflow: NDArray[np.bool_]
