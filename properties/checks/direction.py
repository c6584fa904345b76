"""Whether errors follow the sign of the values, as those of truncation do, in units of chance.

Rounding to nearest has no direction: the error e of one element leads away from zero as often as towards it. What has
one (truncation, a weight that errs one way, a scale that is slightly off) adds up in sum e O. Under rounding its
variance is that of sums whose errors are shared within a row (its row sum, its weights) and within a column (a stored
V): two-way clusters (Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136),

    V = sum_r (sum_c e O)^2 + sum_c (sum_r e O)^2 - sum (e O)^2,      T = (sum e O - sum e' O) / sqrt(2 V'),

where e' are the errors of a model kernel and V' is of them: a direction that the model shows too is honest (P divided
before its cast, ties), and a target's own direction must not widen what it is measured in. About N(0, 1) for a kernel
that errs like the model. Measured in the nearest form, bf16 and fp16, on G3's inputs with four seeds not used before:
31 honest kernels of attention, its layouts, mla and both gradients at most 2.9; truncated outputs 17 to 99, P truncated
60 to 87, for dV 21 to 113.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from oracle.formats import Float64Array

LIMIT = 6.0
"""Beyond it chance is 2e-9; for a kernel with 1.5 times the model's noise, G3's limit, T has variance 1.6: 3e-6."""


def along(errors: Iterable[Float64Array], values: Iterable[Float64Array]) -> tuple[float, float]:
    """(sum e O, V) over blocks [r, c] that are independent of each other; what is not finite has no direction."""
    total = variance = 0.0
    for error, value in zip(errors, values, strict=True):
        shares = np.where(np.isfinite(error) & np.isfinite(value), error * value, 0.0)
        single, total = float((shares**2).sum()), total + float(shares.sum())
        both = float((shares.sum(axis=1) ** 2).sum() + (shares.sum(axis=0) ** 2).sum())
        variance += max(both - single, single)
    return total, variance


def apart(target: Sequence[Float64Array], model: Sequence[Float64Array], values: Sequence[Float64Array]) -> float:
    """abs(T) of a target's errors against a model's, by block; 0 if both are exact, inf if the model alone is."""
    (total, _), (modelled, variance) = along(target, values), along(model, values)
    gap = abs(total - modelled)
    return gap / float(np.sqrt(2 * variance)) if variance else (0.0 if gap == 0 else float("inf"))
