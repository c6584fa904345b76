"""rope and rope_apply: the formula against a second witness, identities, enclosures, bounds that hold."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_rope import INPUTS, draw_positions
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.rope import case as rope_case
from oracle.ops.rope import formula as rope

OPS = {op.name: op for op in rope_case.OPS}
LAYOUTS = rope.LAYOUTS


def enclosed(case: Case, ar: Any = None, key: tuple[int, int] = (0, 0)) -> Block:
    arithmetic = BallArithmetic() if ar is None else ar
    op = OPS[case.op]
    assert key in op.blocks(case)
    with arithmetic.working():
        return op.evaluate(arithmetic, case, key, np.arange(op.row_count(case)))


def rope_of(x: NDArray[Any], positions: NDArray[np.int64], **options: Any) -> Case:
    return Case("rope", {"x": x, "positions": positions}, options)


def witness(row: NDArray[Any], position: int, base: float, rotary_dim: int, layout: str) -> list[mpmath.mpf]:
    """One row, entry by entry: theta_i = base^(-2i/d), a pair turned by position x theta_i."""
    entries = [mpmath.mpf(value) for value in row.astype(np.float64).tolist()]
    out = list(entries)
    for i in range(rotary_dim // 2):
        angle = position * mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / rotary_dim)
        a, b = (i, i + rotary_dim // 2) if layout == "half" else (2 * i, 2 * i + 1)
        out[a] = entries[a] * mpmath.cos(angle) - entries[b] * mpmath.sin(angle)
        out[b] = entries[a] * mpmath.sin(angle) + entries[b] * mpmath.cos(angle)
    return out


POSITIONS = np.array([0, 1, 2, 4095, 1_000_003, 2**24 - 1, 2**24 + 1, -7, 2**40 + 1], dtype=np.int64)


@pytest.mark.parametrize(("dim", "rotary_dim"), [(8, None), (10, 6), (2, 2), (12, 12)])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 1234.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula_equals_the_second_witness(dim: int, rotary_dim: int | None, base: float, layout: str) -> None:
    x = np.random.default_rng(dim).standard_normal((2, 2, len(POSITIONS), dim)).astype(np.float32)
    case = rope_of(x, POSITIONS, base=base, layout=layout, rotary_dim=rotary_dim)
    out = enclosed(case, mp_arithmetic(250), (1, 0)).values["out"]
    with mpmath.workprec(300):
        for i, position in enumerate(POSITIONS.tolist()):
            for found, expected in zip(
                out[i], witness(x[1, 0, i], position, base, rotary_dim or dim, layout), strict=True
            ):
                assert abs(mpmath.mpf(found) - expected) <= mpmath.mpf(2) ** -190, (position, layout)


def test_positions_by_batch() -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, 3, 4)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 8, 9]], dtype=np.int64)
    both = rope_of(x, positions)
    alone = rope_of(x, positions[1])
    assert np.array_equal(enclosed(both, key=(1, 0)).part("out").hi, enclosed(alone, key=(1, 0)).part("out").hi)
    assert not np.array_equal(enclosed(both, key=(0, 0)).part("out").hi, enclosed(alone, key=(0, 0)).part("out").hi)


def test_arb_and_ball_enclose_the_definition() -> None:
    """Thousands of entries, every kind of input and position: mp inside arb and inside ball."""
    rng = np.random.default_rng(2)
    checked = 0
    for dtype in ("fp64", "fp32", "fp16", "bf16"):
        for layout in LAYOUTS:
            for draw in INPUTS.values():
                positions = np.concatenate([POSITIONS, draw_positions(rng, 8)])
                x = FORMATS[dtype].store(draw(rng, (len(positions), 10), FORMATS[dtype]))[None, None]
                case = rope_of(x, positions, layout=layout, rotary_dim=8, base=float(rng.choice([1e4, 5e5, 777.0])))
                exact = enclosed(case, mp_arithmetic(300))
                for block in (enclosed(case, arb_arithmetic(160)), enclosed(case)):
                    for part in ("cos", "sin", "out"):
                        assert inside(exact.values[part], block, part).all(), (
                            dtype,
                            layout,
                            part,
                            block.ar.name,
                        )
                        checked += block.part(part).hi.size
    assert checked > 20_000


def inside(exact: NDArray[Any], block: Block, part: str) -> NDArray[np.bool_]:
    """Whether each mp number (300 bits, of which a position takes up to 41) lies in its enclosure."""
    e = block.part(part)
    result = np.zeros(e.hi.shape, dtype=bool)
    with mpmath.workprec(300):
        for index in np.ndindex(*e.hi.shape):
            gap = abs(mpmath.mpf(exact[index]) - mpmath.mpf(float(e.hi[index])) - mpmath.mpf(float(e.lo[index])))
            slack = mpmath.mpf(2) ** -220 * max(1, abs(mpmath.mpf(exact[index])))
            result[index] = gap <= mpmath.mpf(float(e.rad[index])) + slack
    return result


def test_digits_of_positions_give_the_same_table() -> None:
    """Tables beyond 512 positions come from angle addition; every entry still holds the direct one."""
    positions = np.concatenate([np.arange(700), np.array([2**24, -1, -513, 2**50 + 3, 700])])
    fine = arb_arithmetic(200)
    with fine.working():
        exact = [fine.to_enclosure(part) for part in rope.table(fine, positions, 10000.0, 8)]
    ball = BallArithmetic()
    with ball.working():
        fast = rope.table(ball, positions, 10000.0, 8)
    for (hi, lo, rad), part in zip(exact, fast, strict=True):
        gap = np.abs((part.mid - hi) - lo) + rad
        assert (gap <= part.rad).all()
        assert float(part.rad.max()) < 2e-14


def test_identity_at_position_zero_and_copies_beyond_rotary_dim() -> None:
    x = np.random.default_rng(1).standard_normal((1, 1, 600, 12)).astype(np.float16)
    positions = np.arange(600, dtype=np.int64)
    for layout in LAYOUTS:
        case = rope_of(x, positions, layout=layout, rotary_dim=8)
        for ar in (None, arb_arithmetic()):
            e = enclosed(case, ar).part("out")
            assert np.array_equal(e.hi[:, 8:], x[0, 0, :, 8:].astype(np.float64))
            assert not e.rad[:, 8:].any()
            assert not e.lo[:, 8:].any()
            assert np.array_equal(e.hi[0], x[0, 0, 0].astype(np.float64))


# What is said of the rotation, to the last digits.

BITS = 240


def largest_gap(a: NDArray[Any], b: NDArray[Any]) -> mpmath.mpf:
    with mpmath.workprec(BITS):
        return max(abs(x - y) for x, y in zip(a.flat, b.flat, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_forms_of_the_rotation_are_one_function(layout: str) -> None:
    """By pairs, by the block-diagonal matrix R_m, and by (e^(i theta))^m with repeated squaring."""
    ar = mp_arithmetic(BITS)
    d, positions = 8, np.array([0, 1, 5, 4097, 2**24 + 1, -3], dtype=np.int64)
    x = ar.const(np.random.default_rng(3).standard_normal((len(positions), d)))
    theta = rope.frequencies(ar, 10000.0, d)
    cos, sin = ar.cos_sin(positions, theta)
    by_pairs = rope.rotate(ar, x, cos, sin, dim=d, rotary_dim=d, layout=layout)
    by_matrix = rope.rotate_by_matrix(ar, x, cos, sin, count=len(positions), rotary_dim=d, layout=layout)
    for i, position in enumerate(positions.tolist()):
        row = by_pairs[i : i + 1]
        assert largest_gap(row, by_matrix[i]) <= mpmath.mpf(2) ** (4 - BITS)
        power = rope.rotate_by_powers(ar, x[i : i + 1], theta, position, rotary_dim=d, layout=layout)
        # The angle's own rounding grows with the position, up to 25 bits of it.
        assert largest_gap(row, power) <= mpmath.mpf(2) ** (8 - BITS) * (1 + abs(position))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_on_the_distance_alone(layout: str) -> None:
    """<R_m q, R_n k> = q^T R_(n-m) k = Re(sum q conj(k) e^(i (m-n) theta)), wherever m and n are."""
    ar = mp_arithmetic(BITS)
    d = 12
    rng = np.random.default_rng(4)
    q, k = (ar.const(rng.standard_normal((1, d))) for _ in range(2))
    theta = rope.frequencies(ar, 10000.0, d)
    for m, n in ((0, 0), (5, 2), (2, 5), (1000, 3), (2**24, 2**24 - 77)):
        scores = [
            form(ar, q, k, theta, m + t, n + t, rotary_dim=d, layout=layout)
            for t in (0, 1, 123456)
            for form in (rope.score_rotated, rope.score_relative, rope.score_complex)
        ]
        for score in scores[1:]:
            assert largest_gap(scores[0], score) <= mpmath.mpf(2) ** (34 - BITS)
    assert largest_gap(scores[0], rope.score_rotated(ar, q, k, theta, 5, 2, rotary_dim=d, layout=layout)) > 1e-3


def test_the_transpose_of_the_matrix_is_another_function() -> None:
    """A sign of sine flipped is seen by the identities above: R_(m-n) instead of R_(n-m)."""
    ar = mp_arithmetic(BITS)
    rng = np.random.default_rng(5)
    q, k = (ar.const(rng.standard_normal((1, 4))) for _ in range(2))
    theta = rope.frequencies(ar, 10000.0, 4)
    right = rope.score_rotated(ar, q, k, theta, 9, 2, rotary_dim=4, layout="half")
    wrong = rope.score_relative(ar, q, k, theta, 2, 9, rotary_dim=4, layout="half")
    assert largest_gap(right, wrong) > 1e-3


# Cases.

X = np.zeros((1, 2, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": X[0], "positions": np.arange(3)}, {}, "x must be"),
        ({"x": X, "positions": np.arange(4)}, {}, "positions must be"),
        ({"x": X, "positions": np.arange(3, dtype=np.int32)}, {}, "positions must be int64"),
        ({"x": X, "positions": np.arange(3)}, {"layout": "neox"}, "layout"),
        ({"x": X, "positions": np.arange(3)}, {"rotary_dim": 5}, "rotary_dim"),
        ({"x": X, "positions": np.arange(3)}, {"rotary_dim": 10}, "rotary_dim"),
        ({"x": X[..., :7], "positions": np.arange(3)}, {}, "rotary_dim"),
        ({"x": X, "positions": np.arange(3)}, {"base": -1.0}, "base"),
        ({"x": X, "positions": np.arange(3)}, {"scaling": {"rope_type": "yarn"}}, "scaling"),
        ({"x": X, "positions": np.arange(3)}, {"theta": 1.0}, "theta"),
    ],
)
def test_wrong_rope_cases_are_refused(arrays: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPS["rope"].blocks(Case("rope", arrays, options))


@pytest.mark.parametrize(
    ("cos", "sin", "options", "message"),
    [
        (np.zeros((2, 4)), np.zeros((2, 4)), {}, "cos must be"),
        (np.zeros((3, 4)), np.zeros((3, 3)), {}, "differ"),
        (np.zeros((3, 5)), np.zeros((3, 5)), {}, "cos must be"),
        (np.zeros((3, 4)), np.zeros((3, 4)), {"base": 1.0}, "base"),
    ],
)
def test_wrong_rope_apply_cases_are_refused(cos: Any, sin: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPS["rope_apply"].blocks(Case("rope_apply", {"x": X, "cos": cos, "sin": sin}, options))


def test_non_finite_rows_are_undefined() -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 2], x[0, 0, 2, 0] = np.nan, np.inf
    assert enclosed(rope_of(x, np.arange(4))).undefined.tolist() == [False, True, True, False]
    cos = np.ones((4, 2), np.float32)
    cos[3, 1] = np.nan
    applied = Case("rope_apply", {"x": x, "cos": cos, "sin": np.zeros_like(cos)})
    assert enclosed(applied).undefined.tolist() == [False, True, True, True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_apply_takes_its_table_as_it_is(layout: str) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((1, 2, 5, 10)).astype(np.float32)
    cos, sin = (rng.standard_normal((5, 4)).astype(np.float16) for _ in range(2))
    case = Case("rope_apply", {"x": x, "cos": cos, "sin": sin}, {"layout": layout})
    out = enclosed(case, mp_arithmetic(), (0, 1)).values["out"]
    for i in range(5):
        for pair in range(4):
            a, b = (pair, pair + 4) if layout == "half" else (2 * pair, 2 * pair + 1)
            c, s, u, v = (mpmath.mpf(float(z)) for z in (cos[i, pair], sin[i, pair], x[0, 1, i, a], x[0, 1, i, b]))
            with mpmath.workprec(200):
                assert abs(mpmath.mpf(out[i, a]) - (u * c - v * s)) < mpmath.mpf(2) ** -100
                assert abs(mpmath.mpf(out[i, b]) - (u * s + v * c)) < mpmath.mpf(2) ** -100
    assert np.array_equal(enclosed(case, key=(0, 1)).part("out").hi[:, 8:], x[0, 1, :, 8:].astype(np.float64))
