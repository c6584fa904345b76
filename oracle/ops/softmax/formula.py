"""softmax, log_softmax and logsumexp of rows (textbook definition; Blanchard, Higham and Higham 2021, IMA
J. Numer. Anal. 41).

    p_i = exp(x_i - m) / sum_j exp(x_j - m),  L = m + ln sum_j exp(x_j - m),  ln p_i = (x_i - m) - ln sum_j
    exp(x_j - m)

Shapes: x [R, n], visible bool [R, n]; p and ln p [R, n], L [R, 1]. m is any number, taken near the row's
maximum. An excluded entry (one that was -inf) has p = 0 exactly and a ln p that means nothing. A row
without visible entries has no value at all: the caller gives such rows something harmless.

Why the enclosures are rigorous: any exact number may stand for m without changing p, L or ln p, so a shift
taken from midpoints is exact; every other step is an inclusion-preserving operation of the arithmetic. ln p
is formed from x - m and not from x - L, which would lose the digits that a common offset of the row costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V


@dataclass(frozen=True, slots=True)
class Normalised(Generic[V]):
    """What one set of rows gives: shift m [R, 1], sum l of exp(x - m) [R, 1], p and ln p [R, n], L [R, 1]."""

    shift: V
    total: V
    p: V
    log_p: V
    lse: V


def normalise(ar: Arithmetic[V], x: V, visible: NDArray[np.bool_], *, from_lse: bool = False) -> Normalised[V]:
    """The definition. ``from_lse`` forms p = exp(x - L) and ln p = x - L: equal reals, other roundings."""
    shift = ar.row_max(x, visible)
    exponents = ar.where(visible, ar.sub(x, shift))
    weights = ar.where(visible, ar.exp(exponents))
    total = ar.row_sum(weights, "row_sum")
    log_total = ar.log(total)
    lse = ar.add(shift, log_total)
    if from_lse:
        log_p = ar.where(visible, ar.sub(x, lse))
        p = ar.where(visible, ar.exp(log_p))
    else:
        log_p = ar.where(visible, ar.sub(exponents, log_total))
        p = ar.div(weights, total)
    return Normalised(shift, total, ar.round(p, "output"), ar.round(log_p, "output"), ar.round(lse, "output"))
