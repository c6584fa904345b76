"""All four arithmetics keep the protocol: operations mean the same, precisions are restored, stages are rounded."""

from __future__ import annotations

import inspect

import flint
import mpmath
import numpy as np
import pytest

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.base import Arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import BF16, FP16, FP32, FP64

ARITHMETICS = {
    "mp": lambda: mp_arithmetic(200),
    "arb": lambda: arb_arithmetic(200),
    "ball": BallArithmetic,
    "rounded": lambda: RoundedArithmetic(FP64),
}


EACH = pytest.mark.parametrize("ar", [make() for make in ARITHMETICS.values()], ids=ARITHMETICS)


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
