"""softmax_backward: a second witness, arithmetics in each other, the bound against honest kernels and broken ones."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_softmax import row_sum
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.bounds.softmax import gradient as bounded
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Float64Array, Format
from oracle.ops.contracts import preset_forms
from oracle.ops.softmax.gradient_case import gradient_at, model

Array = NDArray[Any]
FAMILIES = ("normal", "offset", "peaked", "signed y", "large", "tiny", "cancelling", "one entry", "zeros", "long")
ORDERS = ("forward", "backward", "pairs", "lanes")


def case_of(family: str, fmt: Format, rng: np.random.Generator) -> Case:
    n = {"one entry": 1, "long": 700}.get(family, int(rng.choice([2, 3, 17, 64, 130])))
    x, dy = rng.standard_normal((3, n)), rng.standard_normal((3, n))
    if family == "peaked":
        x = x * 20
    y = np.exp(x - x.max(axis=1, keepdims=True))
    y = y / y.sum(axis=1, keepdims=True)
    match family:
        case "offset":
            dy = dy + rng.choice([10, -1e3])
        case "signed y":
            y = x
        case "large":
            dy = dy * (fmt.max_finite / 40)
        case "tiny":
            dy = dy * fmt.smallest_normal * rng.choice([0.02, 1, 30])
        case "cancelling":
            y = np.full((3, n), 1.0 / n)
            dy[:, ::2] = -dy[:, 1::2].repeat(2, axis=1)[:, : dy[:, ::2].shape[1]] if n > 1 else dy[:, ::2]
        case "zeros":
            y[:, ::2] = 0
    return Case("softmax_backward", {"y": fmt.store(y), "dy": fmt.store(np.clip(dy, -fmt.max_finite, fmt.max_finite))})


def kernel(
    case: Case, compute: Format, order: str, *, fused: bool, sum_wide: bool = False, flush: bool = False
) -> Array:
    """dx in the compute format's dtype, every operation rounded to it."""
    real = compute.dtype

    def keep(a: Any) -> Array:
        a = np.asarray(a, dtype=real)
        return np.where(np.abs(a.astype(np.float64)) < compute.smallest_normal, real(0), a) if flush else a

    y, dy = (keep(case.arrays[n].astype(real)) for n in ("y", "dy"))
    with np.errstate(all="ignore"):
        product = keep(y * dy)
        total = row_sum(product, "wide" if sum_wide else order)
        if fused:
            return keep(product - keep(y * total))
        return keep(y * keep(dy - total))


def ratio(case: Case, form: Contract, fmt: Format, dx: Array) -> float:
    block = enclose(case)[0]
    block = refine(case, block, np.ones(3, dtype=bool), 512)
    promise = bounded.bounds(case, block, (form,), {"dx": fmt})[0]["dx"]
    with np.errstate(all="ignore"):
        y = fmt.round(dx.astype(np.float64))
        part = block.part("dx")
        certain = np.maximum(part.distance(y) - part.rad, 0.0)
        found = np.where(certain > 0, certain / promise.bound, 0.0)
    found = np.where(np.isfinite(y), found, np.inf)
    return float(np.where(promise.may_overflow & ~np.isfinite(y), 0.0, found).max())


def form_of(preset: str, *, sum_wide: bool = False) -> Contract:
    return next(f for f in preset_forms("softmax_backward", preset) if (f.sums.row_sum == "fp32") == sum_wide)


KERNELS = [
    pytest.param(dtype, preset, wide, id=f"{dtype}-{preset}{'-wide' if wide else ''}")
    for dtype, preset, wide in (
        ("fp64", "fp64", False),
        ("fp32", "fp32", False),
        ("fp16", "fp32", False),
        ("bf16", "fp32", False),
        ("fp16", "input", False),
        ("bf16", "input", False),
        ("fp16", "input", True),
        ("bf16", "input", True),
    )
]


def worst(dtype: str, preset: str, wide: bool, seeds: range) -> float:
    fmt, most = FORMATS[dtype], 0.0
    compute = fmt if preset in ("input", "fp64") else FORMATS["fp32"]
    form = form_of(preset, sum_wide=wide)
    for place, family in enumerate(FAMILIES):
        for seed in seeds:
            case = case_of(family, fmt, np.random.default_rng([seed, place]))
            for order in ORDERS:
                for fused in (False, True):
                    dx = kernel(case, compute, order, fused=fused, sum_wide=wide)
                    most = max(most, ratio(case, form, fmt, dx))
                    if preset == "fp32" and order == "forward":
                        dx = kernel(case, compute, order, fused=fused, flush=True)
                        most = max(most, ratio(case, form.with_fields(flush=fmt.name == "fp32"), fmt, dx))
    return most


@pytest.mark.parametrize(("dtype", "preset", "wide"), KERNELS)
def test_no_honest_kernel_exceeds_its_bound(dtype: str, preset: str, wide: bool) -> None:
    most = worst(dtype, preset, wide, range(1))
    assert 0.2 < most <= 1


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "preset", "wide"), KERNELS)
def test_no_honest_kernel_exceeds_its_bound_at_length(dtype: str, preset: str, wide: bool) -> None:
    most = worst(dtype, preset, wide, range(1, 60))
    assert most <= 1, most


def test_broken_promises_exceed_it() -> None:
    rng = np.random.default_rng(5)
    for dtype in ("fp32", "bf16"):
        fmt = FORMATS[dtype]
        case = case_of("offset", fmt, rng)
        y, dy = (case.arrays[n].astype(np.float64) for n in ("y", "dy"))
        form = form_of("fp32")
        assert ratio(case, form, fmt, y * dy) > 10
        normalised = (y * dy).sum(axis=1, keepdims=True) / y.sum(axis=1, keepdims=True)
        # In fp32 a stored y sums to 1 but for a few units, which the bound allows.
        assert (ratio(case, form, fmt, y * (dy - normalised)) > 1) == (dtype == "bf16")
    assert ratio(case, form, fmt, kernel(case, fmt, "forward", fused=True)) > 1


def test_the_term_for_products_next_to_zero_is_needed() -> None:
    """Without it an honest fp16 kernel whose products underflow exceeds the bound."""
    fmt = FORMATS["fp16"]
    n = 64
    y = np.full((3, n), 2.0**-7)
    dy = np.full((3, n), fmt.smallest_subnormal * 60)
    y[:, 0], dy[:, 0] = 1.0, 0.0
    case = Case("softmax_backward", {"y": fmt.store(y), "dy": fmt.store(dy)})
    form = form_of("input")
    dx = kernel(case, fmt, "forward", fused=False)
    assert ratio(case, form, fmt, dx) <= 1
    exact = y * (dy - (y * dy).sum(axis=1, keepdims=True))
    u = fmt.unit_roundoff
    summed = (y * dy).sum(axis=1, keepdims=True)
    chain = (n + 1) * u / (1 - (n + 1) * u) * summed
    bare = y * (chain + 2.01 * u * (dy + summed + chain)) + u * np.abs(exact) + fmt.omega
    assert (np.abs(dx - exact) > bare).any()


# --- the enclosures ---------------------------------------------------------------------------------------------------


def witness(case: Case) -> list[list[Any]]:
    """dx in plain mpmath loops."""
    rows = []
    for y, dy in zip(case.arrays["y"].astype(np.float64), case.arrays["dy"].astype(np.float64), strict=True):
        a, b = [mpmath.mpf(float(v)) for v in y], [mpmath.mpf(float(v)) for v in dy]
        inner = mpmath.fsum(p * q for p, q in zip(a, b, strict=True))
        rows.append([p * (q - inner) for p, q in zip(a, b, strict=True)])
    return rows


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "long"])
def test_enclosures_hold_the_second_witness_and_each_other(family: str) -> None:
    case = case_of(family, FORMATS["bf16"], np.random.default_rng(1))
    with mpmath.workprec(400):
        exact = witness(case)
        for ar in (BallArithmetic(), arb_arithmetic(128), mp_arithmetic(300)):
            block = enclose(case, ar=ar)[0]
            part = block.part("dx")
            for i, row in enumerate(exact):
                for j, value in enumerate(row):
                    middle = mpmath.mpf(float(part.hi[i, j])) + mpmath.mpf(float(part.lo[i, j]))
                    slack = mpmath.mpf(float(part.rad[i, j])) + abs(value) * mpmath.mpf(2) ** -100
                    assert abs(middle - value) <= slack, (ar.name, i, j)
    coarse, fine = enclose(case)[0].part("dx"), enclose(case, ar=arb_arithmetic(256))[0].part("dx")
    assert (np.abs((coarse.hi - fine.hi) + (coarse.lo - fine.lo)) <= coarse.rad + fine.rad).all()


def test_rows_with_nan_or_inf_are_undefined_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    y, dy = rng.random((4, 5)), rng.standard_normal((4, 5))
    clean = enclose(Case("softmax_backward", {"y": y.copy(), "dy": dy.copy()}))[0].part("dx").hi
    y[1, 2], dy[3, 0] = np.nan, np.inf
    block = enclose(Case("softmax_backward", {"y": y, "dy": dy}))[0]
    assert block.undefined.tolist() == [False, True, False, True]
    assert np.array_equal(block.part("dx").hi[[0, 2]], clean[[0, 2]])


def test_wrong_cases_are_named() -> None:
    y = np.zeros((2, 3), np.float32)
    for arrays, message in (
        ({"y": y, "dy": y[:1]}, "dy must have the shape of y"),
        ({"y": y[:, :0], "dy": y[:, :0]}, r"y must be \[\.\.\., n\] with n >= 1"),
        ({"y": y.astype(int), "dy": y}, "no floating-point format"),
    ):
        with pytest.raises(ValueError, match=message):
            enclose(Case("softmax_backward", arrays))
    with pytest.raises(ValueError, match="unknown option 'dim'"):
        enclose(Case("softmax_backward", {"y": y, "dy": y}, {"dim": 1}))


def test_the_model_keeps_its_bound() -> None:
    for dtype in ("fp32", "bf16"):
        for preset in ("fp32", "input"):
            for form in preset_forms("softmax_backward", preset):
                case = case_of("normal", FORMATS[dtype], np.random.default_rng(4))
                dx = model(case, (), np.arange(3), form)["dx"]
                assert ratio(case, form, FORMATS[dtype], dx) <= 1


# --- the gradient at x -----------------------------------------------------------------------------------------------


def test_the_gradient_at_x_is_the_derivative() -> None:
    """Against central differences of the definition at 300 bits."""
    x, dy = np.array([[0.5, -1.0, 2.0, -np.inf]]), np.array([[1.0, -2.0, 0.25, 0.0]])
    with mpmath.workprec(300):
        step = mpmath.mpf(2) ** -90

        def value(op: str, row: list[Any]) -> Any:
            e = [mpmath.exp(v) for v in row]
            total = mpmath.fsum(e)
            out = [v / total if op == "softmax" else mpmath.log(v / total) for v in e]
            return mpmath.fsum(o * mpmath.mpf(float(g)) for o, g in zip(out, dy[0], strict=False))

        for op in ("softmax", "log_softmax"):
            ar: Any = arb_arithmetic(200)
            with ar.working():
                dx: Float64Array = ar.to_enclosure(gradient_at(ar, Case(op, {"x": x}), dy)[1].dx)[0]
            assert dx[0, 3] == 0
            for i in range(3):
                rows = [[mpmath.mpf(float(v)) for v in x[0, :3]] for _ in range(2)]
                rows[0][i], rows[1][i] = rows[0][i] + step, rows[1][i] - step
                slope = (value(op, rows[0]) - value(op, rows[1])) / (2 * step)
                assert abs(slope - mpmath.mpf(float(dx[0, i]))) < 1e-15


def graph(op: str, x: Array, dy: Array, fmt: Format, *, stored: bool) -> Array:
    """dx as a graph of single fp32 operations makes it, with the maximum's own gradient; or from a stored output."""
    wide, given = x.astype(np.float32), dy.astype(np.float32)
    top = wide.max(axis=1, keepdims=True)
    e = np.exp(wide - top)
    total = row_sum(e, "forward")
    if op == "softmax":
        if stored:
            y = fmt.store(e / total).astype(np.float32)
            return y * (given - row_sum(y * given, "pairs"))
        d_total = -row_sum(given * e / (total * total), "forward")
        d_e = given / total + d_total
    elif stored:
        p = np.exp(fmt.store((wide - top) - np.log(total)).astype(np.float32))
        return given - p * row_sum(given, "pairs")
    else:
        d_e = -row_sum(given, "forward") / total
    back = d_e * e if op == "softmax" else given + d_e * e
    first = np.zeros_like(back)
    first[np.arange(len(x)), wide.argmax(axis=1)] = -row_sum(back, "forward")[:, 0]
    return back + first


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stored", [True, False])
def test_no_honest_gradient_exceeds_its_bound(op: str, dtype: str, stored: bool) -> None:
    fmt, most = FORMATS[dtype], 0.0
    form = preset_forms(op, "fp32")[0]
    for seed in range(25):
        rng = np.random.default_rng(seed)
        n = int(rng.choice([1, 2, 9, 64, 200]))
        x = fmt.store(rng.standard_normal((3, n)) * rng.choice([0.1, 1, 6, 20]) + rng.choice([0, 0, 30]))
        dy = fmt.store(rng.standard_normal((3, n)) * rng.choice([1e-3, 1, 50]) + rng.choice([0, 5]))
        _, exact, bounds = bounded.gradient_bounds(Case(op, {"x": x}), dy.astype(np.float64), (form,), fmt)
        dx = fmt.round(graph(op, x, dy, fmt, stored=stored).astype(np.float64))
        with np.errstate(all="ignore"):
            most = max(most, float((exact.distance(dx) / bounds[0].bound).max()))
    assert 0.1 < most <= 1, most
