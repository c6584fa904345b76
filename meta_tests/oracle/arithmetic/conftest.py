"""Precisions are the caller's: no test of an arithmetic changes them."""

from __future__ import annotations

import flint
import mpmath
import pytest


@pytest.fixture(autouse=True)
def _precisions_are_restored():
    before = flint.ctx.prec, mpmath.mp.prec
    yield
    assert (flint.ctx.prec, mpmath.mp.prec) == before
