"""`arb`: proven enclosures at any precision, on python-flint (Arb ball arithmetic, F. Johansson, IEEE TC 2017).

Every operation returns a ball that contains the exact result of every choice of exact inputs within the
operands' balls; that is Arb's inclusion property, proved per function in its documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import flint
import numpy as np

from oracle.arithmetic.scalar import Objects, ScalarArithmetic, Scalars, objects


def _product(a: Objects, b: Objects) -> Objects:
    result = flint.arb_mat(a.tolist()) * flint.arb_mat(b.tolist())
    return objects(result.entries(), (a.shape[0], b.shape[1]))


def split_ball(x: flint.arb) -> tuple[float, float, float]:
    """(hi, lo, rad) in float64 with the ball inside hi + lo +- rad; rad is inf where the ball is not finite."""
    hi = float(x.mid())
    if not (np.isfinite(hi) and x.is_finite()):
        return (hi if np.isfinite(hi) else 0.0), 0.0, float("inf")
    lo = float((x.mid() - hi).mid())
    outside = (x - hi - lo).abs_upper()
    # float() rounds to nearest, to zero below 2^-1075: one step up makes it an upper bound again.
    return hi, lo, float(np.nextafter(float(outside), np.inf)) if outside > 0 else 0.0


def arb_arithmetic(precision: int = 113) -> ScalarArithmetic[flint.arb]:
    """An Arb arithmetic of ``precision`` bits, for use inside ``with ar.working():``, which restores the old one."""

    @contextmanager
    def working() -> Iterator[None]:
        before = flint.ctx.prec
        flint.ctx.prec = precision
        try:
            yield
        finally:
            flint.ctx.prec = before

    return ScalarArithmetic(
        "arb",
        precision,
        Scalars(
            number=flint.arb,
            fraction=lambda n, d: flint.arb(n) / d,
            quotient=lambda x, y: x / y,
            exp=lambda x: x.exp(),
            log=lambda x: x.log(),
            tanh=lambda x: x.tanh(),
            sqrt=lambda x: x.sqrt(),
            cos=lambda x: x.cos(),
            sin=lambda x: x.sin(),
            pi=lambda: flint.arb.pi(),
            midpoint=lambda x: x.mid(),
            split=split_ball,
            product=_product,
            working=working,
        ),
    )
