"""The four arithmetics: what `ball` assumes of numpy, that balls hold exact values, that all keep the protocol."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from fractions import Fraction

import flint
import mpmath
import numpy as np
import pytest

from oracle.arithmetic.arb import arb_arithmetic, split_ball
from oracle.arithmetic.ball import EXP_FLOOR, EXP_REL, LOG_REL, TANH_REL, TINY, Ball, BallArithmetic
from oracle.arithmetic.base import Arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import BF16, FP16, FP32, FP64

U = 2.0**-53
ARITHMETICS = {
    "mp": lambda: mp_arithmetic(200),
    "arb": lambda: arb_arithmetic(200),
    "ball": BallArithmetic,
    "rounded": lambda: RoundedArithmetic(FP64),
}
EACH = pytest.mark.parametrize("ar", [make() for make in ARITHMETICS.values()], ids=ARITHMETICS)


@pytest.fixture(autouse=True)
def _precisions_are_restored():
    before = flint.ctx.prec, mpmath.mp.prec
    yield
    assert (flint.ctx.prec, mpmath.mp.prec) == before


# ---- what ball assumes of numpy: 10^6 points against arb


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


# ---- balls hold exact values


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


# ---- arb and mp


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


def test_precision_is_restored_even_after_an_error():
    before = flint.ctx.prec, mpmath.mp.prec
    arb, finer, mp = arb_arithmetic(301), arb_arithmetic(777), mp_arithmetic(501)

    def fail_within():
        with arb.working():
            assert flint.ctx.prec == 301
            with finer.working(), mp.working():
                assert flint.ctx.prec == 777
                mp.exp(mp.const(1.0))
            assert flint.ctx.prec == 301
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert (flint.ctx.prec, mpmath.mp.prec) == before
    assert mp.exp(mp.const(1.0))[0, 0].context.prec == 501


def small_case():
    rng = np.random.default_rng(8)
    return Case("attention", {n: rng.standard_normal((1, 1, 3, 4)) for n in "qkv"})


def test_enclosing_restores_precision_and_warnings():
    before, errors = (flint.ctx.prec, mpmath.mp.prec), np.geterr()
    case = small_case()
    for ar in (make() for make in ARITHMETICS.values()):
        enclose(case, ar=ar)[0].part("out")
        assert (flint.ctx.prec, mpmath.mp.prec) == before
        assert np.geterr() == errors
    refine(case, enclose(case)[0], np.array([True, False, True]), 512)
    assert (flint.ctx.prec, mpmath.mp.prec) == before
    with pytest.raises(IndexError):
        enclose(case, rows=np.array([9]), ar=arb_arithmetic(300))
    assert (flint.ctx.prec, mpmath.mp.prec) == before
    assert np.geterr() == errors


# ---- the protocol


def operations_of_protocol():
    return [name for name in vars(Arithmetic) if not name.startswith("_")]


@EACH
def test_the_whole_protocol_is_there(ar):
    wanted = operations_of_protocol()
    assert {
        "add",
        "matmul",
        "exp",
        "row_max",
        "cos_sin",
        "power",
        "round",
        "to_enclosure",
        "angles",
        "name",
    } <= set(wanted)
    for name in wanted:
        declared = vars(Arithmetic)[name]
        present = getattr(type(ar), name, None) if name != "name" else ar.name
        assert present is not None, f"{ar.name} lacks {name}"
        if inspect.isfunction(declared):
            have, want = (inspect.signature(f).parameters for f in (present, declared))
            assert list(have)[: len(want)] == list(want), f"{ar.name}.{name}"
            assert all(p.default is not p.empty for p in list(have.values())[len(want) :])


def run_everything(ar):
    """Every operation once, on numbers for which the expected results are plain."""
    a, b = np.array([[1.0, -2.0, 0.5], [4.0, 0.25, 3.0]]), np.array([[2.0, 1.0], [0.5, -1.0], [4.0, 8.0]])
    seen = np.array([[True, False, True], [False, True, True]])
    with ar.working():
        x, y = ar.const(a), ar.const(b)
        some = {
            "add": ar.add(x, x),
            "sub": ar.sub(x, ar.const(np.array([[1.0], [2.0]]))),
            "mul": ar.mul(x, ar.rational(3, 1)),
            "div": ar.div(x, ar.rational(3, 1)),
            "rational": ar.rational(1, 3),
            "pi": ar.pi(),
            "matmul": ar.matmul(x, y, "s"),
            "transpose": ar.transpose(x),
            "exp": ar.exp(x),
            "log": ar.log(ar.mul(x, x)),
            "tanh": ar.tanh(x),
            "sqrt": ar.sqrt(ar.mul(x, x)),
            "row_max": ar.row_max(x, seen),
            "row_max of nothing": ar.row_max(x, np.zeros((2, 3), bool)),
            "maximum": ar.maximum(ar.row_max(x, seen), ar.const(np.array([[2.0], [2.0]]))),
            "row_sum": ar.row_sum(x, "s"),
            "where": ar.where(seen, x),
            "select": ar.select(seen, x, ar.add(x, x)),
            "columns": ar.columns(x, 0, 3, 2),
            "rows": ar.rows(y, 1, 3),
            "hstack": ar.hstack([x, ar.columns(x, 0, 1)]),
            "round": ar.round(x, "a stage that no contract names"),
        }
        angles = ar.angles
        with angles.working():
            frequencies = angles.power(10000.0, np.array([0, -1, -2]), 3)
        some["cos"], some["sin"] = ar.cos_sin(np.array([0, 1, 2**24]), frequencies)
        found = {name: ar.to_enclosure(value) for name, value in some.items()}
    logs, angle = np.log(a * a), np.array([[0], [1], [2**24]]) * 10000.0 ** (np.arange(3) / -3)
    expected = {
        "add": 2 * a,
        "sub": a - [[1], [2]],
        "mul": 3 * a,
        "div": a / 3,
        "rational": [[1 / 3]],
        "pi": [[np.pi]],
        "matmul": a @ b,
        "transpose": a.T,
        "exp": np.exp(a),
        "log": logs,
        "tanh": np.tanh(a),
        "sqrt": np.abs(a),
        "row_max": [[1], [3]],
        "row_max of nothing": [[0], [0]],
        "maximum": [[2], [3]],
        "row_sum": a.sum(1, keepdims=True),
        "where": np.where(seen, a, 0),
        "select": np.where(seen, a, 2 * a),
        "columns": a[:, ::2],
        "rows": b[1:3],
        "hstack": np.hstack([a, a[:, :1]]),
        "round": a,
        "cos": np.cos(angle),
        "sin": np.sin(angle),
    }
    return found, expected


@EACH
def test_every_operation_means_the_same(ar):
    found, expected = run_everything(ar)
    assert found.keys() == expected.keys()
    for name, (hi, lo, rad) in found.items():
        want = np.asarray(expected[name], dtype=np.float64)
        loose = 1e-7 if name in ("cos", "sin") else 1e-14  # numpy's own angle at 2^24 is that coarse
        assert {hi.shape, lo.shape, rad.shape} == {want.shape}, name
        assert hi.dtype == np.float64, name
        assert np.allclose(hi, want, rtol=loose, atol=loose), name
        assert (rad <= 1e-13).all(), name
        assert (np.abs(lo) <= 1e-14).all(), name


def test_arb_holds_mp_and_ball_holds_arb():
    found = {name: run_everything(make())[0] for name, make in ARITHMETICS.items()}
    for name, (hi, lo, rad) in found["ball"].items():
        for other in ("mp", "arb"):
            ohi, olo, orad = found[other][name]
            assert (np.abs((hi - ohi) + (lo - olo)) <= rad + orad + np.abs(hi) * 2.0**-104).all(), (
                name,
                other,
            )


def positions_in_question():
    some = np.array([0, 1, 999, 2**24 - 1, 2**24])
    rng = np.random.default_rng(10)
    many = np.concatenate([np.arange(700), rng.integers(0, 2**24, 50)])
    return {
        "few": some,
        "many": many,
        "unsorted, repeated, negative": np.append(rng.integers(-99, 99, 1500), 2**40),
    }


@pytest.mark.parametrize("which", positions_in_question())
def test_cos_and_sin_hold_the_exact_ones_at_any_position(which):
    # More than a few positions go by angle addition over tables.
    positions, ball, mp = positions_in_question()[which], BallArithmetic(), mp_arithmetic(400)
    numerators = -2 * np.arange(0, 32, 5)
    with ball.working():
        with ball.angles.working():
            frequencies = ball.angles.power(10000.0, numerators, 64)
        pair = ball.cos_sin(positions, frequencies)
    exact = mp.cos_sin(positions, mp.power(10000.0, numerators, 64))
    for got, want in zip(pair, exact, strict=True):
        radius = got.radius()
        assert got.mid.shape == want.shape
        assert (radius < (1.2e-16 if which == "few" else 1e-14)).all()
        assert all(abs(want[i] - float(got.mid[i])) <= float(radius[i]) for i in np.ndindex(want.shape))


def test_integers_keep_their_sixty_three_bits_as_positions():
    mp = mp_arithmetic(200)
    cos, _ = mp.cos_sin(np.array([2**62 + 1]), mp.const([[1.0]]))
    with mpmath.workprec(300):
        assert abs(cos[0, 0] - mpmath.cos(2**62 + 1)) < 1e-40


# ---- rounded: the model of an honest kernel


def test_sums_are_sequential_in_the_format_of_the_stage():
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((3, 300)).astype(np.float32), rng.standard_normal((300, 2)).astype(np.float32)
    for fmt, stages in ((FP32, {}), (FP16, {"s": FP16}), (BF16, {"s": BF16})):
        ar = RoundedArithmetic(FP32, stages)
        total, product = ar.row_sum(a, "s"), ar.matmul(a, b, "s")
        assert total.dtype == product.dtype == np.float32
        for i in range(3):
            plain = np.float32(0)
            for x in a[i]:
                plain = np.float32(fmt.round(plain + x))
            assert total[i, 0] == plain
            for j in range(2):
                chain = np.float32(0)
                for x, y in zip(a[i], b[:, j], strict=True):
                    chain = np.float32(fmt.round(chain + x * y))
                assert product[i, j] == chain
    assert RoundedArithmetic(FP32).row_sum(np.zeros((2, 0), np.float32), "s").shape == (2, 1)


def test_only_the_named_stage_is_rounded():
    ar = RoundedArithmetic(FP32, {"weights": BF16, "output": FP64})
    x = ar.const(np.array([[1 + 2.0**-10, 2.0**-149, 3e38]]))
    assert np.array_equal(ar.round(x, "weights"), np.array([[1.0, 0.0, BF16.round(3e38)]], dtype=np.float32))
    for stage in ("scores", "output", "lse"):
        assert np.array_equal(ar.round(x, stage), x)
    assert ar.round(x, "weights").dtype == np.float32


def test_the_compute_format_is_really_used():
    single, double = RoundedArithmetic(FP32), RoundedArithmetic(FP64)
    for op in ("exp", "log", "tanh", "sqrt"):
        low, high = (getattr(ar, op)(ar.const([[0.7]])) for ar in (single, double))
        assert low.dtype == np.float32
        assert high.dtype == np.float64
        assert 0 < abs(float(low[0, 0]) - float(high[0, 0])) < 1e-6
    assert single.angles.compute is FP32
    assert RoundedArithmetic(FP32, {"angle": FP64}).angles.compute is FP64
