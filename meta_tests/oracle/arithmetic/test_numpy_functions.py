"""What `ball` assumes of numpy's elementary functions, measured against arb on the machine that runs it."""

from __future__ import annotations

import flint
import numpy as np
import pytest

from oracle.arithmetic.ball import EXP_FLOOR, EXP_REL, LOG_REL, TANH_REL, TINY

U = 2.0**-53


def near_one(rng, n):
    return 1 + np.ldexp(rng.uniform(-1, 1, n), -rng.integers(1, 53, n))


def powers(rng, n, low, high):
    return np.ldexp(rng.uniform(1, 2, n), rng.integers(low, high, n).astype(int))


def exp_points(rng, n):
    part = n // 4
    small = powers(rng, part, -60, 4) * rng.choice([-1, 1], part)
    ends = np.concatenate([rng.uniform(-745, -700, part // 2), rng.uniform(700, 709, part // 2)])
    return np.concatenate([rng.uniform(-745, 709, n - 2 * part), small, ends])


def log_points(rng, n):
    part = n // 3
    return np.concatenate(
        [powers(rng, n - 2 * part, -1074, 1024), near_one(rng, part), rng.uniform(0.25, 1 << 17, part)]
    )


def tanh_points(rng, n):
    part = n // 2
    return np.concatenate([powers(rng, n - part, -1040, 5) * rng.choice([-1, 1], n - part), rng.uniform(-22, 22, part)])


def worst_relative_error(function, name, x, *, least=0.0):
    """The largest |function(x) - true| / |true| over x, rounded up; gaps up to ``least`` count as none."""
    # numpy has other loops for contiguous, strided and short operands: each must keep the assumption.
    spread = np.empty(3 * len(x))
    spread[::3] = x
    loops = [
        function(x),
        function(spread[::3]),
        np.concatenate([function(p) for p in np.array_split(x, len(x) // 5)]),
    ]
    worst = 0.0
    before = flint.ctx.prec
    flint.ctx.prec = 100
    try:
        values = np.stack([loops[0], *(np.where(y == loops[0], np.nan, y) for y in loops[1:])], axis=1).tolist()
        for point, candidates in zip(x.tolist(), values, strict=True):
            exact = getattr(flint.arb(point), name)()
            for y in candidates:
                if y == y:
                    gap = float(abs(exact - y).upper())
                    if gap > least:
                        worst = max(worst, gap / float(abs(exact)))
    finally:
        flint.ctx.prec = before
    return worst * (1 + 1e-12)


@pytest.mark.parametrize(
    ("function", "name", "points", "allowed", "n"),
    [
        (np.exp, "exp", exp_points, EXP_REL, 400_000),
        (np.log, "log", log_points, LOG_REL, 300_000),
        (np.tanh, "tanh", tanh_points, TANH_REL, 300_000),
    ],
    ids=["exp", "log", "tanh"],
)
def test_numpy_errs_by_a_quarter_of_what_ball_allows(function, name, points, allowed, n):
    x = points(np.random.default_rng(1), n)
    # Below the floor `ball` promises only TINY.
    worst = worst_relative_error(function, name, x, least=TINY / 4)
    assert 0 < worst * 4 <= allowed, f"worst error of np.{name}: {worst / U:.3f} units of 2^-53"
    assert allowed >= 8 * U


def test_tiny_exponentials_stay_below_the_floor():
    assert np.exp(EXP_FLOOR) * 2**20 < TINY
    assert np.exp(EXP_FLOOR) >= np.finfo(np.float64).tiny
    x = np.linspace(-800, EXP_FLOOR, 4001)
    assert (np.exp(x) <= np.exp(EXP_FLOOR)).all()


def test_the_measurement_sees_a_bad_function():
    x = log_points(np.random.default_rng(2), 3000)
    assert worst_relative_error(lambda v: np.log(v) * (1 + 2.0**-50), "log", x) * 4 > LOG_REL
    # In the strided loop alone:
    assert (
        worst_relative_error(lambda v: np.log(v) * (1 if v.flags.contiguous else 1 + 2.0**-50), "log", x) * 4 > LOG_REL
    )
