"""The bounds of softmax, log_softmax and logsumexp: no honest kernel exceeds them, and defects do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_softmax import FAMILIES, KERNELS, Kernel, row_sum, run_kernel
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block
from oracle.bounds.softmax import output as bounds_softmax
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Format
from oracle.ops.contracts import preset_forms
from oracle.ops.softmax import case as softmax_case

OPS = {op.name: op for op in softmax_case.OPS}
NAMES = tuple(OPS)


def enclosed(case: Case, ar: Any = None) -> Block:
    arithmetic = BallArithmetic() if ar is None else ar
    op = OPS[case.op]
    with arithmetic.working():
        return op.evaluate(arithmetic, case, (), np.arange(op.row_count(case)))


def form_of(preset: str, label: str) -> Contract:
    return next(form for form in preset_forms("softmax", preset) if form.label == label)


def worst_ratio(observed: NDArray[Any], case: Case, block: Block, form: Contract, fmt: Format) -> float:
    """The largest distance / bound where something is promised; inf for an illegal non-finite."""
    found = bounds_softmax.bounds(case, block, [form], {"out": fmt})[0]["out"]
    e = block.part("out")
    y = observed.astype(np.float64).reshape(e.hi.shape)
    with np.errstate(all="ignore"):
        distance = np.maximum(e.distance(y) - e.rad, 0.0)
        ratio = np.where(distance == 0, 0.0, distance / found.bound)
        ratio = np.where(np.isfinite(y), ratio, np.inf)
        nothing_promised = found.may_overflow | ~np.isfinite(found.bound) | (block.empty | block.undefined)[:, None]
    return float(np.where(nothing_promised, 0.0, ratio).max())


def attack(preset: str, dtype: str, sizes: tuple[int, ...], seed: int) -> dict[tuple[str, str, str], float]:
    """(op, kernel's form, family) -> worst ratio, all honest kernels of a preset on inputs of one dtype."""
    fmt = FORMATS[dtype]
    compute = fmt if preset == "input" else FORMATS[preset]
    rng = np.random.default_rng(seed)
    worst: dict[tuple[str, str, str], float] = {}
    for n in sizes:
        for family, draw in FAMILIES.items():
            x = fmt.store(draw(rng, n, fmt))
            blocks = {
                name: enclosed(Case(name, {"x": x}), None if preset != "fp64" else arb_arithmetic(160))
                for name in NAMES
            }
            for kernel in KERNELS:
                if preset == "fp64" and kernel.order == "wide":
                    continue
                outputs = run_kernel(kernel, x, compute, seed)
                for name in NAMES:
                    wide = preset == "input" and kernel.order == "wide"
                    form = form_of(preset, kernel.form + ", fp32 sum" * wide)
                    if preset == "input" and kernel.order == "online":
                        form = form.with_fields(tile=16)
                    observed = fmt.store(outputs[name])
                    ratio = worst_ratio(observed, Case(name, {"x": x}), blocks[name], form, fmt)
                    key = (name, kernel.form, family)
                    worst[key] = max(worst.get(key, 0.0), ratio)
    return worst


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("fp32", "fp32"),
        ("fp32", "fp16"),
        ("fp32", "bf16"),
        ("input", "fp16"),
        ("input", "bf16"),
        ("fp64", "fp64"),
    ],
)
def test_no_honest_kernel_exceeds_its_bound(preset: str, dtype: str) -> None:
    sizes = (1, 2, 3, 17, 80) if preset != "fp64" else (1, 2, 17)
    for seed in range(2):
        worst = attack(preset, dtype, sizes, seed)
        over = {key: ratio for key, ratio in worst.items() if ratio > 1}
        assert not over, over


def test_long_rows_keep_their_bounds() -> None:
    rng = np.random.default_rng(7)
    fmt = FORMATS["fp32"]
    x = fmt.store(
        np.concatenate(
            [rng.standard_normal((2, 2048)), np.zeros((1, 2048)), np.sort(rng.standard_normal((1, 2048)) * 9)]
        )
    )
    for name in NAMES:
        case = Case(name, {"x": x})
        block = enclosed(case)
        for kernel in KERNELS[:9]:
            ratio = worst_ratio(run_kernel(kernel, x, fmt, 0)[name], case, block, form_of("fp32", kernel.form), fmt)
            assert ratio <= 1, (name, kernel)


def narrow_sum(x: NDArray[Any]) -> NDArray[Any]:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    total = row_sum(weights.astype(FORMATS["bf16"].dtype), "forward").astype(np.float32)
    return np.asarray(weights / total)


DEFECTS: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "the row sum runs in bf16": ("softmax", narrow_sum),
    "the last entry is left out of the sum": (
        "softmax",
        lambda x: (
            np.exp(x - x.max(axis=1, keepdims=True))
            / np.exp(x - x.max(axis=1, keepdims=True))[:, :-1].sum(axis=1, keepdims=True)
        ),
    ),
    "no maximum is subtracted": ("softmax", lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
    "log2 e has four digits": (
        "softmax",
        lambda x: _softmax_with(x, lambda d: np.exp2(d * np.float32(1.442))),
    ),
    "exp is off by 1e-3": (
        "softmax",
        lambda x: _softmax_with(x, lambda d: np.exp(d) * np.float32(1.001) ** (d < -1)),
    ),
    "the logarithm of a rounded softmax": ("log_softmax", lambda x: np.log(_softmax_with(x, np.exp))),
    "base 2 instead of e": (
        "logsumexp",
        lambda x: np.log2(np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True)).astype(np.float32),
    ),
    "x - L instead of (x - m) - ln l": ("log_softmax", lambda x: x - _lse32(x)),
}


def _softmax_with(x: NDArray[Any], exp: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    weights = exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _lse32(x: NDArray[Any]) -> NDArray[Any]:
    top = x.max(axis=1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_exceeds_the_fp32_bound(defect: str) -> None:
    """The proof that the check above can fail: each of these is a public kind of bug."""
    name, kernel = DEFECTS[defect]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 384)).astype(np.float32) * 2
    x[1] = np.linspace(0, -110, 384)
    x[2] += 1e5
    case = Case(name, {"x": x})
    with np.errstate(all="ignore"):
        observed = kernel(x)
    ratio = worst_ratio(observed, case, enclosed(case), form_of("fp32", "natural"), FORMATS["fp32"])
    assert ratio > 1


def test_x_minus_lse_is_a_form_of_its_own() -> None:
    """What (x - m) - ln l forbids at a far offset, the form that declares a rounded L allows, and no more."""
    x = np.array([[0, 1, 2]], np.float32) - np.float32(1e7)
    case, fp32 = Case("log_softmax", {"x": x}), FORMATS["fp32"]
    block = enclosed(case)
    observed = x - _lse32(x)
    assert worst_ratio(observed, case, block, form_of("fp32", "natural"), fp32) > 1
    assert worst_ratio(observed, case, block, form_of("fp32", "from lse"), fp32) <= 1
    assert worst_ratio(observed + np.float32(16), case, block, form_of("fp32", "from lse"), fp32) > 1


def test_excluded_entries_must_be_zero() -> None:
    x = np.array([[0, -np.inf, 1]], np.float32)
    case = Case("softmax", {"x": x})
    block = enclosed(case)
    exact = block.part("out").hi.astype(np.float32)
    assert worst_ratio(exact, case, block, form_of("fp32", "natural"), FORMATS["fp32"]) <= 1
    exact[0, 1] = 1e-45
    assert worst_ratio(exact, case, block, form_of("fp32", "natural"), FORMATS["fp32"]) > 1
    # The ball's radius there is below a hundredth of the bound, so nothing needs to be evaluated again.
    bound = bounds_softmax.bounds(case, block, preset_forms("softmax", "fp32"), {})[0]["out"].bound
    assert (block.part("out").rad <= bound / 100).all()


def test_a_sum_that_saturates_has_a_finite_bound() -> None:
    """600 equal entries summed in bf16 give 1/256 each: within the contract `input`, far outside `fp32`."""
    x = np.zeros((1, 600), FORMATS["bf16"].dtype)
    case = Case("softmax", {"x": x})
    block = enclosed(case)
    observed = run_kernel(Kernel("natural", "forward", False, 0.0), x, FORMATS["bf16"], 0)["softmax"]
    assert float(observed[0, 0]) == 1 / 256
    assert worst_ratio(observed, case, block, form_of("input", "natural"), FORMATS["bf16"]) <= 1
    assert worst_ratio(observed, case, block, form_of("fp32", "natural"), FORMATS["bf16"]) > 1
    assert worst_ratio(observed, case, block, form_of("input", "natural, fp32 sum"), FORMATS["bf16"]) > 1


def test_where_overflow_is_legal() -> None:
    top = FORMATS["fp16"].max_finite
    x = np.array([[top, -top], [0, 1]], np.float16)
    for name, expected in (
        ("softmax", [[False] * 2] * 2),
        ("log_softmax", [[False, True], [False] * 2]),
        ("logsumexp", [[False]] * 2),
    ):
        case = Case(name, {"x": x})
        found = bounds_softmax.bounds(case, enclosed(case), preset_forms(name, "fp32"), {"out": FORMATS["fp16"]})
        assert found[0]["out"].may_overflow.tolist() == expected, name
    case = Case("logsumexp", {"x": np.full((1, 4), top, np.float16)})
    found = bounds_softmax.bounds(case, enclosed(case), preset_forms("logsumexp", "fp32"), {"out": FORMATS["fp16"]})
    assert not found[0]["out"].may_overflow.any()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_model_keeps_its_contract(name: str, dtype: str) -> None:
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(11)
    x = fmt.store(rng.standard_normal((16, 40)) * 3)
    case = Case(name, {"x": x})
    presets = ("fp64",) if dtype == "fp64" else ("fp32", "input")
    block = enclosed(case, arb_arithmetic(160) if dtype == "fp64" else None)
    for preset in presets:
        for form in preset_forms(name, preset):
            observed = fmt.store(OPS[name].model(case, (), np.arange(16), form)["out"])
            ratio = worst_ratio(observed, case, block, form, fmt)
            assert 0 < ratio <= 1, form
