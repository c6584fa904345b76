"""Attention: the formula against a second witness, and enclosures in arb and ball."""

from __future__ import annotations

from typing import Any

import flint
import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.oracle.attention.heads import EDGES
from meta_tests.witnesses.attention import DIGITS, case_of, entries, witness
from oracle.arithmetic import ball as balls
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import Ball, BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.evaluate import enclose
from oracle.formats import Float64Array
from oracle.ops.attention import formula as attention
from oracle.ops.attention.formula import Scoring


@pytest.mark.parametrize("name", EDGES)
def test_formula_equals_the_second_witness(name: str) -> None:
    case = EDGES[name]
    exact = witness(case)
    compared = 0
    for block in enclose(case, ar=mp_arithmetic(420)):
        for entry in entries(case, block, exact):
            with mpmath.workdps(DIGITS):
                gap = abs(mpmath.mpf(block.values[entry.part][entry.row, entry.column]) - entry.value)
                assert gap <= entry.doubt, entry
            compared += 1
    assert compared or name == "all masked"


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(
    "engine", [BallArithmetic(), arb_arithmetic(128), arb_arithmetic(3000)], ids=["ball", "arb", "fine"]
)
def test_arb_and_ball_hold_the_second_witness(name: str, engine: Any) -> None:
    case = EDGES[name]
    exact = witness(case)
    for block in enclose(case, ar=engine):
        for entry in entries(case, block, exact):
            assert entry.held_by(block), entry
        if getattr(engine, "precision", 0) == 3000:
            for part in ("scores", "lse", "out"):
                seen = block.visible_keys() if part == "scores" else ~block.empty
                assert np.isfinite(block.part(part).rad[seen]).all(), part


def draw_head(rng: np.random.Generator, index: int) -> tuple[NDArray[Any], ...]:
    """One random head of a random kind: q, k, v, bias or None, visible."""
    kinds = ("normal", "tiny", "large", "vast", "subnormal", "spread", "zeros", "equal", "integers", "rows apart")
    sq, sk = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 8, 30]))
    d, dv = int(rng.choice([1, 2, 3, 16, 65, 256])), int(rng.choice([1, 3]))

    def draw(shape: tuple[int, int], kind: str) -> Float64Array:
        n = rng.standard_normal(shape)
        match kind:
            case "normal":
                return n
            case "tiny":
                return n * 1e-300
            case "large":
                return n * 40
            case "vast":
                return n * 1e300
            case "subnormal":
                return n * 1e-319
            case "spread":
                return np.ldexp(n, rng.integers(-300, 100, shape))
            case "zeros":
                return np.where(rng.random(shape) < 0.5, 0.0, n)
            case "equal":
                return np.repeat(n[:1], shape[0], axis=0)
            case "integers":
                return rng.integers(-3, 4, shape).astype(np.float64)
            case "rows apart":
                return n * np.ldexp(1.0, rng.integers(-400, 100, (shape[0], 1)))
        raise ValueError(kind)

    kq, kk = ("normal", "normal") if index % 3 == 0 else (str(rng.choice(kinds)), str(rng.choice(kinds)))
    q, k, v = draw((sq, d), kq), draw((sk, d), kk), draw((sk, dv), str(rng.choice(kinds)))
    if index % 7 == 1:
        q[:, 0], k[:, 0] = 1e8, 1.0
    visible = rng.random((sq, sk)) < (1.0 if index % 2 else 0.6)
    bias = None
    if index % 4 == 2:
        bias = np.where(
            rng.random((sq, sk)) < 0.4, rng.choice([-1e30, -3.4e38, -65504.0]), rng.standard_normal((sq, sk))
        )
    return q, k, v, bias, visible


def evaluated(ar: Any, head: tuple[NDArray[Any], ...], how: str) -> dict[str, Any]:
    q, k, v, bias, visible = head
    values = [ar.const(a) for a in (q, k, v)]
    more: dict[str, Any] = {
        "scoring": Scoring(attention.default_scale(ar, q.shape[1]), None if bias is None else ar.const(bias)),
        "visible": visible,
    }
    if how == "tiled":
        out, lse = attention.attention_tiled(ar, *values, tile=3, **more)
    elif how == "split":
        out, lse = attention.attention_split(ar, *values, splits=3, **more)
    else:
        done = attention.attention(ar, *values, normalise_first=how == "normalised", **more)
        return {"scores": done.scores, "out": done.out, "lse": done.lse}
    return {"out": out, "lse": lse}


def escapes(seed: int, count: int, *, shrink: float = 1.0) -> tuple[int, int, int]:
    """(certain escapes from the ball, entries decided, entries) over ``count`` random heads, against arb."""
    rng = np.random.default_rng(seed)
    ball, exact = BallArithmetic(), arb_arithmetic(500)
    out = decided = tried = 0
    for index in range(count):
        head = draw_head(rng, index)
        how = ("plain", "tiled", "split", "normalised")[index % 4]
        with ball.working():
            coarse = {name: (b.mid, b.radius() * shrink) for name, b in evaluated(ball, head, how).items()}
        with exact.working():
            truth = evaluated(exact, head, how)
            for name, (mid, radius) in coarse.items():
                for i in np.ndindex(mid.shape):
                    if not head[4][i[0]].any() or (name == "scores" and not head[4][i]):
                        continue
                    tried += 1
                    if not np.isfinite(radius[i]):
                        continue
                    decided += 1
                    gap = abs(truth[name][i] - flint.arb(float(mid[i])))
                    # A nan in arb (exp beyond its exponents) would be an escape too: nothing is known there.
                    out += not gap.is_finite() or bool(gap.lower() > flint.arb(float(radius[i])))
    return out, decided, tried


def test_balls_hold_arb_on_thousands_of_entries() -> None:
    out, decided, tried = escapes(5, 700)
    assert out == 0, f"{out} of {tried} entries lie outside their ball"
    assert decided > 4000
    assert decided > 0.6 * tried


def test_a_radius_that_is_too_small_is_noticed() -> None:
    assert escapes(5, 60, shrink=2.0**-9)[0] > 0


def test_ball_is_sharp_enough_to_be_useful() -> None:
    rng = np.random.default_rng(1)
    case = case_of(rng, (1, 1, 1, 64, 512, 64, 16), dtype="fp32")
    block = enclose(case)[0]
    assert block.part("out").rad.max() < 1e-11
    assert block.part("lse").rad.max() < 1e-11


def test_wide_products_next_to_subnormals_keep_their_radius() -> None:
    # 2^16 and more scores of exact inputs share a radius a row; gamma times a tiny norm must not vanish on the way.
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((270, 8)) * 1e300, rng.standard_normal((8, 270)) * 1e-312
    ball, exact = BallArithmetic(), arb_arithmetic(300)
    with ball.working():
        found = ball.matmul(ball.const(a), ball.const(b), "s")
        radius = found.radius()
    assert found.mid.size > 2**16
    with exact.working():
        rows = rng.integers(0, 270, 6)
        truth = exact.matmul(exact.const(a[rows]), exact.const(b), "s")
        for i, j in np.ndindex(truth.shape):
            gap = abs(truth[i, j] - flint.arb(float(found.mid[rows[i], j])))
            assert gap <= flint.arb(float(radius[rows[i], j]))


def test_what_overflowed_is_not_known() -> None:
    ball = BallArithmetic()
    with ball.working():
        burst = Ball(np.array([[np.inf]]), 0.0, 2.0**-50)
        quotient = ball.div(ball.const(np.ones((1, 1))), burst)
        sunk = ball.exp(Ball(np.array([[-np.inf, 0.0]]), 1e-3, 0.0))
    assert np.isinf(quotient.radius()).all()
    assert np.isinf(sunk.radius()).all()


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="subnormals"):
            enclose(EDGES["plain"])
    finally:
        torch.set_flush_denormal(False)
    enclose(EDGES["plain"])


def test_norms_of_subnormal_rows_are_upper_bounds() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        x = rng.integers(0, 9, (2, 7)) * 5e-324 * 2.0 ** int(rng.integers(0, 40))
        x[1] *= 2.0 ** float(rng.integers(0, 900))
        for axis in (-2, -1):
            found = balls._norm2(x, axis).ravel()
            with mpmath.workdps(60):
                for got, values in zip(found.tolist(), (x.T if axis == -2 else x).tolist(), strict=True):
                    assert mpmath.mpf(got) ** 2 >= mpmath.fsum(mpmath.mpf(t) ** 2 for t in values)
