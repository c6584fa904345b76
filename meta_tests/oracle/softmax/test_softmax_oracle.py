"""softmax, log_softmax, logsumexp: the formula against a second witness, enclosures, and bounds that hold."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.case import Case
from oracle.formats import FORMATS, format_of
from oracle.ops.softmax import case as softmax_case

OPS = {op.name: op for op in softmax_case.OPS}
NAMES = tuple(OPS)


def enclosed(case: Case, ar: Any = None) -> Block:
    arithmetic = BallArithmetic() if ar is None else ar
    op = OPS[case.op]
    with arithmetic.working():
        return op.evaluate(arithmetic, case, (), np.arange(op.row_count(case)))


def witness(x: NDArray[Any], digits: int = 80) -> dict[str, list[list[mpmath.mpf]]]:
    """Plain loops from the definition: no shift at all, mpmath's exponent range needs none."""
    with mpmath.workdps(digits):
        result: dict[str, list[list[mpmath.mpf]]] = {"softmax": [], "log_softmax": [], "logsumexp": []}
        for row in x.astype(np.float64).tolist():
            powers = [mpmath.exp(mpmath.mpf(value)) for value in row]
            whole = mpmath.fsum(powers)
            result["softmax"].append([power / whole for power in powers])
            result["log_softmax"].append([mpmath.log(power / whole) if power else mpmath.ninf for power in powers])
            result["logsumexp"].append([mpmath.log(whole)])
        return result


def rows_of_every_kind(rng: np.random.Generator, dtype: Any) -> NDArray[Any]:
    """[R, 7]: plain, tied, far offset, huge range, subnormal, near the largest number, masked."""
    fmt = format_of(np.zeros(1, dtype))
    top, tiny = fmt.max_finite, fmt.smallest_subnormal
    plain = rng.standard_normal((4, 7))
    rows = [
        *plain,
        np.zeros(7),
        np.repeat(plain[:1, :1], 7, axis=1)[0],
        plain[0] * 1e-3 + min(1e7, top / 4),
        plain[1] * min(1e5, top / 8),
        np.array([1, -1, 0, 2, 3, -5, 7]) * tiny,
        np.array([1, 0.5, 0.25, 0.999, -1, 0, 0.75]) * top,
        np.array([-1, -1, -1, -1, -1, -1, -1]) * top,
        np.linspace(0, -min(800, top / 2), 7),
    ]
    x = np.array(rows).astype(dtype)
    masked = x.copy()
    masked[:, ::2] = -np.inf
    return np.concatenate([x, masked])


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_formula_equals_the_second_witness(name: str, dtype: str) -> None:
    x = rows_of_every_kind(np.random.default_rng(1), FORMATS[dtype].dtype)
    # fp64 reaches 1e308: keep the loops' exponents below mpmath's patience.
    x = x[np.where(np.isneginf(x), 0, np.abs(x.astype(np.float64))).max(axis=1) < 1e40]
    block = enclosed(Case(name, {"x": x}), mp_arithmetic(400))
    expected = witness(x, 300)[name]
    for i, row in enumerate(expected):
        for j, value in enumerate(row):
            if np.isneginf(float(x[i, j])) and name == "log_softmax":
                assert value == mpmath.ninf
                continue
            found = block.values["out"][i, j]
            with mpmath.workdps(100):
                assert abs(mpmath.mpf(found) - value) <= mpmath.mpf(10) ** -60 * max(1, abs(value)), (i, j)


def test_arb_and_ball_enclose_the_definition() -> None:
    """Thousands of entries of every kind: mp inside arb, arb inside ball."""
    for seed, dtype in enumerate(("fp64", "fp32", "fp16", "bf16", "fp32", "fp64")):
        rng = np.random.default_rng(seed)
        x = np.concatenate([rows_of_every_kind(rng, FORMATS[dtype].dtype) for _ in range(4)])
        for name in NAMES:
            case = Case(name, {"x": x})
            reference = enclosed(case, mp_arithmetic(300))
            proven, fast = enclosed(case, arb_arithmetic(160)), enclosed(case)
            for part in ("out", "p", "log_p", "lse", "total"):
                exact = reference.values[part]
                assert inside(exact, proven, part).all(), (dtype, name, part)
                assert inside(exact, fast, part).all(), (dtype, name, part)


def inside(exact: NDArray[Any], block: Block, part: str) -> NDArray[np.bool_]:
    """Whether each mp number (300 bits: its own error is far below any radius) lies in its enclosure."""
    e = block.part(part)
    result = np.zeros(e.hi.shape, dtype=bool)
    with mpmath.workprec(300):
        for index in np.ndindex(*e.hi.shape):
            if np.isinf(e.rad[index]):
                result[index] = True
                continue
            gap = abs(mpmath.mpf(exact[index]) - mpmath.mpf(float(e.hi[index])) - mpmath.mpf(float(e.lo[index])))
            slack = abs(mpmath.mpf(exact[index])) * mpmath.mpf(2) ** -280
            result[index] = gap <= mpmath.mpf(float(e.rad[index])) + slack
    return result


def test_ball_is_sharp_enough_to_be_useful() -> None:
    x = np.random.default_rng(5).standard_normal((32, 300)).astype(np.float32) * 3 + 1e6
    block = enclosed(Case("log_softmax", {"x": x}))
    assert float((block.part("p").rad / block.part("p").hi).max()) < 1e-11
    assert float(block.part("log_p").rad.max()) < 1e-11


def test_special_rows() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([[0, -inf, 0], [-inf, -inf, -inf], [1, inf, 0], [nan, 0, 0], [0, -inf, nan]], dtype=np.float32)
    for name in NAMES:
        for ar in (None, mp_arithmetic(), arb_arithmetic()):
            block = enclosed(Case(name, {"x": x}), ar)
            assert block.empty.tolist() == [False, True, False, False, False]
            assert block.undefined.tolist() == [False, False, True, True, True]
            assert block.visible_keys()[0].tolist() == [True, False, True]
    p = enclosed(Case("softmax", {"x": x}), arb_arithmetic()).part("out")
    assert p.hi[0].tolist() == [0.5, 0.0, 0.5]
    assert p.rad[0, 1] == 0


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": np.zeros((3, 0), np.float32)}, {}, "x must be"),
        ({"x": np.float32(1).reshape(())}, {}, "x must be"),
        ({"x": np.zeros((3, 2), np.int32)}, {}, "int32"),
        ({"x": np.zeros((3, 2), np.float32)}, {"dim": 0}, "dim"),
    ],
)
def test_wrong_cases_are_refused(arrays: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPS["softmax"].blocks(Case("softmax", arrays, options))


def test_shapes_and_flattening() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    case = Case("softmax", {"x": x})
    assert OPS["softmax"].output_shapes(case) == {"out": (2, 3, 5)}
    assert OPS["logsumexp"].output_shapes(Case("logsumexp", {"x": x})) == {"out": (2, 3)}
    assert OPS["softmax"].row_count(case) == 6
    whole = enclosed(case).part("out").hi
    some = OPS["softmax"].evaluate(arb_arithmetic(), case, (), np.array([4, 1])).part("out").hi
    assert np.allclose(some, whole[[4, 1]], rtol=1e-14, atol=0)
