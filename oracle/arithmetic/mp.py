"""`mp`: the definition at any precision, on mpmath (gmpy2 backend). The reference that people read and trust.

Not a proof: mpmath's elementary functions are correctly rounded in practice, not certified. Each instance owns
its context, so no global precision changes.
"""

from __future__ import annotations

from contextlib import nullcontext

import mpmath
import numpy as np

from oracle.arithmetic.scalar import Objects, ScalarArithmetic, Scalars


def mp_arithmetic(precision: int = 113) -> ScalarArithmetic[mpmath.mpf]:
    """An mpmath arithmetic of ``precision`` bits; values are object arrays of ``mpf``."""
    ctx = mpmath.mp.clone()
    ctx.prec = precision

    def product(a: Objects, b: Objects) -> Objects:
        out = np.empty((a.shape[0], b.shape[1]), dtype=object)
        columns = [list(b[:, j]) for j in range(b.shape[1])]
        for i in range(a.shape[0]):
            row = list(a[i])
            out[i] = [ctx.fdot(row, column) for column in columns]
        return out

    def split(x: mpmath.mpf) -> tuple[float, float, float]:
        hi = float(x)
        lo = float(x - hi) if np.isfinite(hi) else 0.0
        return hi, lo, 0.0

    return ScalarArithmetic(
        "mp",
        precision,
        Scalars(
            number=ctx.mpf,
            fraction=lambda n, d: ctx.mpf(n) / d,
            quotient=lambda x, y: x / y if y else ctx.nan,
            exp=ctx.exp,
            log=ctx.log,
            tanh=ctx.tanh,
            sqrt=ctx.sqrt,
            cos=ctx.cos,
            sin=ctx.sin,
            pi=lambda: +ctx.pi,
            midpoint=lambda x: x,
            split=split,
            product=product,
            working=nullcontext,
        ),
    )
