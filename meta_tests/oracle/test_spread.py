"""Sums over keys of what lies between values and their output: both ways of taking them, against long doubles."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from oracle.bounds import spread as module
from oracle.bounds.spread import spread, values_of
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array

ROWS, KEYS, WIDTH = 9, 200, 5


def numbers(seed: int, shift: float) -> tuple[Float64Array, Float64Array, Float64Array]:
    """v [n, Dv] with zeros of both signs and ties, weights [r, n] of which some are zero, and outputs [r, Dv]."""
    rng = np.random.default_rng(seed)
    v = np.round(rng.standard_normal((KEYS, WIDTH)), 1) + shift
    v[:2], v[2:4] = 0.0, -0.0
    weight = rng.random((ROWS, KEYS)) * (rng.random((ROWS, KEYS)) < 0.7)
    weight /= weight.sum(axis=1, keepdims=True)
    out = weight @ v
    # Outputs that are values, and one that is zero.
    out[0], out[1] = np.round(out[0], 1), 0.0
    return v, weight, out


def exact(v: Float64Array, weight: Float64Array, out: Float64Array) -> NDArray[np.longdouble]:
    wide = np.longdouble
    gaps = np.abs(v.astype(wide)[None] - out.astype(wide)[:, None])
    return np.einsum("rn,rnd->rd", weight.astype(wide), gaps)


def found(v: Float64Array, weight: Float64Array, out: Float64Array) -> Float64Array:
    zero = np.zeros_like(out)
    visible = np.ones(weight.shape, dtype=bool)
    return spread(values_of(v, out), Enclosure(out, zero, zero), [weight], visible).weighted[0]


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("shift", [0.0, -0.1, 50.0])
def test_weighted_distances(monkeypatch: pytest.MonkeyPatch, listed: bool, shift: float) -> None:
    monkeypatch.setattr(module, "MANY", 1 if listed else 2**60)
    monkeypatch.setattr(module, "SORTED", 1.0)
    monkeypatch.setattr(module, "LISTED", 1.0)
    for seed in range(20):
        v, weight, out = numbers(seed, shift)
        assert shift == 50.0 or (values_of(v, out).near is not None) == listed
        true = exact(v, weight, out)
        assert (found(v, weight, out) >= true).all()
        assert (found(v, weight, out) <= true * (1 + 1e-9) + 1e-11 * abs(shift)).all()


def test_values_that_are_not_listed_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 1)
    v, weight, out = numbers(0, 0.0)
    nothing = np.zeros(0, dtype=np.int64)
    none = module.Near(nothing, np.zeros(0), np.zeros(WIDTH + 1, dtype=np.int64), np.zeros(WIDTH, dtype=np.int64))
    monkeypatch.setattr(module, "_near", lambda *_: none)
    assert (found(v, weight, out) < exact(v, weight, out)).any()


def test_too_many_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 1)
    monkeypatch.setattr(module, "SORTED", 1.0)
    monkeypatch.setattr(module, "LISTED", 0.0)
    v, weight, out = numbers(0, 0.0)
    near = values_of(v, out).near
    assert near is not None and module._between(near, out, KEYS) is None
    assert (found(v, weight, out) >= exact(v, weight, out)).all()
