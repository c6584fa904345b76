"""Balls hold every exact result, whatever the operation, the regime and the order in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import flint
import numpy as np
import pytest

from oracle.arithmetic.arb import arb_arithmetic, split_ball
from oracle.arithmetic.ball import Ball, BallArithmetic

U = 2.0**-53


def draw(rng, shape, regime):
    """Midpoints of one regime."""
    n = rng.standard_normal(shape)
    match regime:
        case "normal":
            return n
        case "spread":
            return np.ldexp(n, rng.integers(-60, 60, shape))
        case "wild":
            return np.ldexp(n, rng.integers(-1000, 1000, shape))
        case "subnormal":
            return np.ldexp(n, rng.integers(-1074, -1010, shape))
        case "zeros":
            return np.where(rng.random(shape) < 0.5, 0.0, n)
        case "huge":
            return np.ldexp(n, rng.integers(1000, 1023, shape))
        case "masks":
            return np.where(rng.random(shape) < 0.4, -1e30, 5 * n)
        case "rows apart":
            return n * np.ldexp(1.0, rng.integers(-700, 700, (shape[0], 1)))
        case "columns apart":
            return n * np.ldexp(1.0, rng.integers(-700, 700, (1, shape[1])))
        case "exponents":
            return rng.uniform(-800, 720, shape)
        case "overflowed":
            return np.where(rng.random(shape) < 0.2, rng.choice([np.inf, -np.inf, np.nan], shape), n)
    raise ValueError(regime)


REGIMES = (
    "normal",
    "spread",
    "wild",
    "subnormal",
    "zeros",
    "huge",
    "masks",
    "rows apart",
    "columns apart",
    "exponents",
    "overflowed",
)


def draw_ball(rng, shape, regime):
    """Midpoints with radii of every layout: none, one, one a row, one a column, one an entry."""
    mid = draw(rng, shape, regime)
    layouts = [(), (1, 1), (shape[0], 1), (1, shape[1]), shape]

    def radius(scale):
        if rng.random() < 0.3:
            return 0.0
        layout = layouts[rng.integers(len(layouts))]
        with np.errstate(over="ignore"):
            size = np.ldexp(rng.random(layout), rng.integers(-60, 3, layout)) * scale
        return float(size) if layout == () else size

    size = np.abs(mid[np.isfinite(mid)])
    return Ball(mid, radius(float(size.max(initial=0.0)) * 2.0 ** -float(rng.integers(0, 40))), radius(0.7))


def to_arb(x):
    out = np.empty(np.shape(x), dtype=object)
    out.flat = [flint.arb(float(v)) for v in np.asarray(x, dtype=np.float64).flat]
    return out


def members(rng, ball, where):
    """Exact matrices within the ball: its midpoints, its corners, and points between.

    Where a midpoint overflowed, the exact entry may be anything.
    """
    shape = ball.mid.shape
    known = np.isfinite(ball.mid)
    mid = np.where(known, ball.mid, np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-60, 60, shape)))
    rad, rel = (to_arb(np.where(known, np.broadcast_to(r, shape), 0.0)) for r in (ball.rad, ball.rel))
    reach = rad + rel * np.abs(to_arb(mid))
    t = {
        "middle": np.zeros(shape),
        "up": np.ones(shape),
        "down": -np.ones(shape),
        "outward": np.where(mid < 0, -1.0, 1.0),
        "corner": rng.choice([-1.0, 1.0], shape),
        "inside": rng.uniform(-1, 1, shape),
    }[where]
    return to_arb(mid) + to_arb(t) * reach


WHERE = ("middle", "up", "down", "outward", "corner", "inside")
EXACT = arb_arithmetic(1200)


@dataclass(frozen=True)
class Operation:
    """One operation: shapes of its operands, and how to apply it in any arithmetic."""

    shapes: tuple[tuple[int, int], ...]
    apply: object
    regimes: tuple[str, ...] = REGIMES
    domain: object = None  # entries where the true operation is defined, else the ball must be unbounded


def positive(x):
    return np.array([bool(v > 0) for v in x.flat]).reshape(x.shape)


def not_negative(x):
    return np.array([bool(v >= 0) for v in x.flat]).reshape(x.shape)


MASK = np.random.default_rng(99).random((7, 9)) < 0.6


OPERATIONS = {
    "add": Operation(((7, 9), (7, 9)), lambda ar, a, b: ar.add(a, b)),
    "add row": Operation(((7, 9), (7, 1)), lambda ar, a, b: ar.add(a, b)),
    "sub": Operation(((7, 9), (7, 9)), lambda ar, a, b: ar.sub(a, b)),
    "sub row": Operation(((7, 9), (7, 1)), lambda ar, a, b: ar.sub(a, b)),
    "mul": Operation(((7, 9), (7, 9)), lambda ar, a, b: ar.mul(a, b)),
    "mul row": Operation(((7, 9), (7, 1)), lambda ar, a, b: ar.mul(a, b)),
    "mul one": Operation(((1, 1), (7, 9)), lambda ar, a, b: ar.mul(a, b)),
    "mul outer": Operation(((7, 1), (1, 9)), lambda ar, a, b: ar.mul(a, b)),
    "div": Operation(((7, 9), (7, 9)), lambda ar, a, b: ar.div(a, b)),
    "div row": Operation(((7, 9), (7, 1)), lambda ar, a, b: ar.div(a, b)),
    "matmul": Operation(((7, 5), (5, 9)), lambda ar, a, b: ar.matmul(a, b, "s")),
    "matmul one": Operation(((9, 1), (1, 9)), lambda ar, a, b: ar.matmul(a, b, "s")),
    "matmul long": Operation(((3, 80), (80, 4)), lambda ar, a, b: ar.matmul(a, b, "s")),
    "exp": Operation(((7, 9),), lambda ar, a: ar.exp(a)),
    "log": Operation(((7, 9),), lambda ar, a: ar.log(a), domain=positive),
    "tanh": Operation(((7, 9),), lambda ar, a: ar.tanh(a)),
    "sqrt": Operation(((7, 9),), lambda ar, a: ar.sqrt(a), domain=not_negative),
    "row_sum": Operation(((7, 9),), lambda ar, a: ar.row_sum(a, "s")),
    "row_sum of weights": Operation(((7, 9),), lambda ar, a: ar.row_sum(ar.exp(a), "s"), ("normal", "masks", "zeros")),
    "transpose": Operation(((7, 9),), lambda ar, a: ar.transpose(a)),
    "columns": Operation(((7, 9),), lambda ar, a: ar.columns(a, 1, 8, 2)),
    "rows": Operation(((7, 9),), lambda ar, a: ar.rows(a, 2, 5)),
    "hstack": Operation(((7, 9), (7, 2)), lambda ar, a, b: ar.hstack([a, b])),
    "where": Operation(((7, 9),), lambda ar, a: ar.where(MASK, a)),
    "select": Operation(((7, 9), (7, 9)), lambda ar, a, b: ar.select(MASK, a, b)),
    "softmax weights": Operation(
        ((7, 9),), lambda ar, a: ar.exp(ar.sub(a, ar.const(np.full((7, 1), 3.0)))), ("normal", "masks")
    ),
}


def escapes(operation, rng, regime, *, shrink=1.0, rounds=1):
    """Over random balls of a regime: how many exact results lie outside the ball's, and how many were tried."""
    out, tried = 0, 0
    ball = BallArithmetic()
    for _ in range(rounds):
        operands = [draw_ball(rng, shape, regime) for shape in operation.shapes]
        if operation.domain is not None and rng.random() < 0.7:
            operands = [replace(b, mid=np.abs(b.mid)) for b in operands]
        with ball.working():
            result = operation.apply(ball, *operands)
            mid, radius = result.mid, result.radius() * shrink
        with EXACT.working():
            for where in WHERE:
                points = [members(rng, b, where) for b in operands]
                exact = operation.apply(EXACT, *points)
                defined = np.ones(exact.shape, bool) if operation.domain is None else operation.domain(points[0])
                for i in np.ndindex(exact.shape):
                    tried += 1
                    if np.isinf(radius[i]):
                        continue
                    if not defined[i] or not exact[i].is_finite():
                        # Nothing is known there (a pole, or exp beyond arb's exponents), so the radius must
                        # say so.
                        out += not exact[i].is_finite() or not defined[i]
                        continue
                    out += bool(abs(exact[i] - flint.arb(float(mid[i]))) > flint.arb(float(radius[i])))
    return out, tried


@pytest.mark.parametrize("name", OPERATIONS)
def test_balls_hold_every_exact_result(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    operation = OPERATIONS[name]
    total = 0
    for regime in operation.regimes:
        out, tried = escapes(operation, rng, regime, rounds=8)
        assert out == 0, f"{out} of {tried} exact results of {name} lie outside the ball ({regime})"
        total += tried
    assert total > 500


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_radius_that_is_too_small_is_noticed(name):
    # The self-check of the check: an eighth of the radius must not hold everything.
    rng = np.random.default_rng(5)
    found = sum(
        escapes(OPERATIONS[name], rng, regime, shrink=0.125, rounds=3)[0]
        for regime in ("normal", "spread", "zeros")
        if regime in OPERATIONS[name].regimes
    )
    assert found > 0


def test_rows_far_below_the_others_keep_their_radius():
    # Their squares underflow, so that their norms vanish in float64 unless that is accounted for.
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((3, 40)), rng.standard_normal((40, 3))
    a[0] *= 1e-170
    a[1] *= 1e-250
    result = BallArithmetic().matmul(Ball(a), Ball(b), "s")
    for i in np.ndindex(3, 3):
        exact = sum(Fraction(x) * Fraction(y) for x, y in zip(a[i[0]].tolist(), b[:, i[1]].tolist(), strict=True))
        assert abs(exact - Fraction(float(result.mid[i]))) <= Fraction(float(result.radius()[i]))


def test_underflowing_midpoints_keep_their_radius():
    # A relative radius times a midpoint that underflowed to zero is nothing: an absolute one must stand in.
    ball, tiny = BallArithmetic(), np.array([[2.0**-600]])
    with ball.working():
        product = ball.mul(Ball(tiny, 0.0, 2.0**900), Ball(tiny))
        assert product.mid == 0
        assert product.radius() >= 2.0**-300
        product = ball.mul(Ball(tiny), Ball(tiny, 2.0**400))
        assert product.mid == 0
        assert product.radius() >= 2.0**-200
        quotient = ball.div(Ball(tiny, 0.0, 2.0**900), Ball(1 / tiny))
        assert quotient.mid == 0
        assert quotient.radius() >= 2.0**-300
        product = ball.matmul(Ball(tiny, 0.0, 2.0**900), Ball(tiny), "s")
        assert product.mid == 0
        assert product.radius() >= 2.0**-300
        power = ball.exp(Ball(np.array([[-800.0, -1e30]]), 300.0))
        assert power.mid[0, 0] == 0
        assert power.radius()[0, 0] >= np.exp(-500.0)


def test_wide_products_of_exact_inputs():
    # Scores: [n, d] times [d, m] with m m large takes one radius a row.
    rng = np.random.default_rng(4)
    a, b = (
        rng.standard_normal((300, 8)),
        rng.standard_normal((8, 300)) * np.ldexp(1.0, rng.integers(-30, 30, (1, 300))),
    )
    result = BallArithmetic().matmul(Ball(a), Ball(b), "s")
    assert result.rad.shape == (300, 1)
    for i in zip(rng.integers(0, 300, 500), rng.integers(0, 300, 500), strict=True):
        exact = sum(Fraction(x) * Fraction(y) for x, y in zip(a[i[0]].tolist(), b[:, i[1]].tolist(), strict=True))
        assert abs(exact - Fraction(float(result.mid[i]))) <= Fraction(float(result.radius()[i]))


def test_sums_in_any_memory_order():
    rng = np.random.default_rng(6)
    mid, rad = (np.asfortranarray(x) for x in (rng.random((4, 5000)), rng.random((4, 5000)) * 2.0**-30))
    result = BallArithmetic().row_sum(Ball(mid, rad), "s")
    for i in range(4):
        exact = sum(map(Fraction, mid[i].tolist())) + sum(map(Fraction, rad[i].tolist()))
        assert abs(exact - Fraction(float(result.mid[i, 0]))) <= Fraction(float(result.radius()[i, 0]))
    # The worst order: 1 first, and then nothing but halves of its last digit, which all round away.
    lost = np.asfortranarray(np.where(np.arange(5000) == 0, 1.0, U) * np.ones((2, 1)))
    result = BallArithmetic().row_sum(Ball(np.zeros((2, 5000)), lost), "s")
    assert all(Fraction(float(r)) >= 1 + 4999 * Fraction(U) for r in result.radius()[:, 0])


def test_masks_and_overflow_are_never_decided_wrongly():
    ball = BallArithmetic()
    with ball.working():
        huge = ball.mul(Ball(np.array([[1e200, 1.0]])), Ball(np.array([[1e200, 2.0]])))
        assert np.isinf(huge.radius()[0, 0])
        assert huge.radius()[0, 1] < 1e-15
        burst = ball.exp(Ball(np.array([[710.0], [1.0]])))
        assert np.isinf(burst.radius()[0, 0])
        assert burst.radius()[1, 0] < 1e-14
        masked = ball.exp(Ball(np.array([[-1e30, 0.0]]), 0.0, 2.0**-50))
        assert masked.mid[0, 0] == 0
        assert masked.radius()[0, 0] < 1e-290
        assert masked.radius()[0, 1] < 1e-10
        assert np.isinf(ball.div(Ball(np.ones((1, 1))), Ball(np.zeros((1, 1)), 1e-9)).radius()).all()
        assert np.isinf(ball.log(Ball(np.array([[0.0, -1.0]]))).radius()).all()
        assert np.isinf(ball.add(Ball(np.array([[np.inf]])), Ball(np.array([[1.0]]))).radius()).all()


def test_split_holds_the_ball():
    rng = np.random.default_rng(7)
    arb = arb_arithmetic(300)
    with arb.working():
        some = [
            flint.arb(float(x)) * (flint.arb(2) ** int(e))
            for x, e in zip(rng.standard_normal(400), rng.integers(-1400, 1100, 400), strict=True)
        ]
        some = [x.exp() / x if i % 2 else x * flint.arb("1 +/- 1e-20") for i, x in enumerate(some)]
        some += [
            flint.arb(0),
            flint.arb(10) ** -400,
            flint.arb("0 +/- 1e-400"),
            flint.arb(2) ** 1024,
            flint.arb("nan"),
            flint.arb("inf"),
        ]
        infinite = 0
        for x in some:
            hi, lo, rad = split_ball(x)
            assert np.isfinite(hi)
            assert np.isfinite(lo)
            assert not np.isnan(rad)
            infinite += rad == np.inf
            if np.isfinite(rad):
                assert abs(x - hi - lo) <= flint.arb(rad)
                assert rad <= float(x.rad()) * 1.01 + abs(hi) * 2.0**-100 + 1e-323
        assert 3 <= infinite < 200
