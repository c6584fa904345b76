"""The bounds of rope and rope_apply: no honest kernel exceeds them, and defects do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_rope import DOUBLE, INPUTS, KERNELS, Kernel, draw_positions, run_kernel
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block
from oracle.bounds.rope import rotation as bounds_rope
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import FORMATS, Format
from oracle.ops.contracts import preset_forms
from oracle.ops.rope import case as rope_case
from oracle.ops.rope import formula as rope

OPS = {op.name: op for op in rope_case.OPS}
LAYOUTS = rope.LAYOUTS


def enclosed(case: Case, ar: Any = None, key: tuple[int, int] = (0, 0)) -> Block:
    arithmetic = BallArithmetic() if ar is None else ar
    with arithmetic.working():
        return OPS[case.op].evaluate(arithmetic, case, key, np.arange(OPS[case.op].row_count(case)))


def rope_of(x: NDArray[Any], positions: NDArray[np.int64], **options: Any) -> Case:
    return Case("rope", {"x": x, "positions": positions}, options)


def form_of(preset: str, label: str = "plain") -> Contract:
    return next(form for form in preset_forms("rope", preset) if form.label == label)


def form_for(kernel: Kernel) -> Contract:
    by_calls = kernel.preset == "input_all" and kernel.angle == "fp32"
    return form_of(kernel.preset, "fp32 angle" if by_calls else "plain")


def worst_ratio(observed: NDArray[Any], case: Case, block: Block, form: Contract, fmt: Format) -> float:
    """The largest distance / bound; inf where a bound of zero is missed or a non-finite value is illegal."""
    name = rope_case.output_name(case)
    found = bounds_rope.bounds(case, block, [form], {name: fmt})[0][name]
    e = block.part(name)
    y = observed.astype(np.float64)
    with np.errstate(all="ignore"):
        distance = np.maximum(e.distance(y) - e.rad, 0.0)
        ratio = np.where(distance == 0, 0.0, distance / found.bound)
        ratio = np.where(np.isfinite(y), ratio, np.inf)
    return float(np.where(found.may_overflow | block.undefined[:, None], 0.0, ratio).max())


def attack(kernel: Kernel, dtype: str, seed: int, rows: int = 24) -> dict[str, float]:
    """Family of inputs -> worst ratio of one honest kernel."""
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(seed)
    worst = {}
    for family, draw in INPUTS.items():
        base = float(rng.choice([1e4, 5e5, 1e6, 12345.678]))
        rotary_dim = int(rng.choice([2, 6, 16, 20, 64]))
        positions = draw_positions(rng, rows)
        x = fmt.store(draw(rng, (rows, rotary_dim + 2), fmt))
        if fmt.name == "fp16" and kernel.angle == "input":
            # Beyond 65504 there is no such position in fp16, nor a base.
            positions, base = positions % 60000, 10000.0
        case = rope_of(x[None, None], positions, base=base, rotary_dim=rotary_dim)
        block = enclosed(case, arb_arithmetic(160) if dtype == "fp64" else None)
        with np.errstate(all="ignore"):
            observed = run_kernel(kernel, x, positions, base, rotary_dim, fmt, seed)
        worst[family] = worst_ratio(observed, case, block, form_for(kernel), fmt)
    return worst


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.preset}-{k.frequency}{'-worst' * k.worst}")
def test_no_honest_kernel_exceeds_its_bound(kernel: Kernel, dtype: str) -> None:
    for seed in range(6):
        worst = attack(kernel, dtype, seed)
        assert max(worst.values()) <= 1, worst


def test_no_honest_fp64_kernel_exceeds_its_bound() -> None:
    for seed in range(3):
        worst = attack(DOUBLE, "fp64", seed)
        assert max(worst.values()) <= 1, worst


DEFECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "table in bf16": ("fp32_angle", {"table": "bf16"}),
    "frequencies and positions in bf16": ("fp32_angle", {"angle": "bf16"}),
    "rotation in bf16": ("fp32_angle", {"turn": "bf16"}),
    "angles in fp32 where fp64 is claimed": ("fp64_angle", {"angle": "fp32"}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_narrower_stage_exceeds_the_bound(defect: str) -> None:
    preset, change = DEFECTS[defect]
    fmt = FORMATS["fp32"]
    rng = np.random.default_rng(8)
    x = rng.standard_normal((32, 64)).astype(np.float32)
    positions = np.arange(32, dtype=np.int64) + 300
    case = rope_of(x[None, None], positions)
    honest = Kernel(preset, "pow", angle="fp64" if preset == "fp64_angle" else "fp32")
    block = enclosed(case)
    assert worst_ratio(run_kernel(honest, x, positions, 1e4, 64, fmt, 0), case, block, form_of(preset), fmt) <= 1
    broken = run_kernel(replace(honest, **change), x, positions, 1e4, 64, fmt, 0)
    assert worst_ratio(broken, case, block, form_of(preset), fmt) > 1


@pytest.mark.parametrize("change", ["layout", "base", "sign", "offset", "rotary_dim"])
def test_a_wrong_rotation_exceeds_the_bound(change: str) -> None:
    fmt = FORMATS["bf16"]
    x = fmt.store(np.random.default_rng(9).standard_normal((16, 32)))
    positions = np.arange(16, dtype=np.int64) + 40
    case = rope_of(x[None, None], positions, layout="interleaved" if change == "layout" else "half")
    base = 10050.0 if change == "base" else 1e4
    used = {"sign": -positions, "offset": positions + 1}.get(change, positions)
    observed = run_kernel(KERNELS[0], x, used, base, 16 if change == "rotary_dim" else 32, fmt, 0)
    assert worst_ratio(observed, case, enclosed(case), form_of("fp32_angle"), fmt) > 1


def test_copies_have_bound_zero_and_a_proof_of_it() -> None:
    x = np.random.default_rng(10).standard_normal((4, 8)).astype(np.float32)
    positions = np.arange(4, dtype=np.int64)
    case = rope_of(x[None, None], positions, rotary_dim=4)
    block = enclosed(case)
    observed = run_kernel(KERNELS[0], x, positions, 1e4, 4, FORMATS["fp32"], 0)
    assert worst_ratio(observed, case, block, form_of("fp32_angle"), FORMATS["fp32"]) <= 1
    observed[2, 6] = np.nextafter(observed[2, 6], np.float32(9))
    assert worst_ratio(observed, case, block, form_of("fp32_angle"), FORMATS["fp32"]) == np.inf


def test_interleaved_bounds_are_the_half_ones_rearranged() -> None:
    x = np.random.default_rng(11).standard_normal((1, 1, 9, 10))
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 9])
    positions = np.arange(9, dtype=np.int64) * 1000
    found = []
    for layout, values in (("half", x), ("interleaved", x[..., order])):
        case = rope_of(values.astype(np.float32), positions, layout=layout, rotary_dim=8)
        found.append(bounds_rope.bounds(case, enclosed(case), [form_of("fp32_angle")], {})[0]["out"].bound)
    assert np.allclose(found[0][:, order], found[1], rtol=1e-12)


def test_far_fp32_angles_are_vacuous_and_say_so_by_their_size() -> None:
    x = np.ones((1, 1, 3, 4), np.float32)
    case = rope_of(x, np.array([10, 10**4, 10**8], dtype=np.int64))
    bound = bounds_rope.bounds(case, enclosed(case), [form_of("fp32_angle")], {})[0]["out"].bound
    assert bound[0].max() < 1e-4
    assert bound[1, 0] < 1e-2
    assert bound[2, 0] > 1


def test_where_overflow_is_legal() -> None:
    top = FORMATS["fp16"].max_finite
    x = np.array([[[[top, top], [top, 0.0]]]], np.float16)
    case = rope_of(x, np.array([1, 1], dtype=np.int64))
    found = bounds_rope.bounds(case, enclosed(case), [form_of("fp32_angle")], {})[0]["out"]
    assert found.may_overflow.tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rope_apply_bounds(dtype: str) -> None:
    """The rotation alone, tables given: in fp32, and call by call in the input's format after a cast."""
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(12)
    for draw in INPUTS.values():
        x = fmt.store(draw(rng, (16, 12), fmt))
        cos, sin = (rng.uniform(-1, 1, (16, 6)).astype(np.float32) for _ in range(2))
        case = Case("rope_apply", {"x": x[None, None], "cos": cos, "sin": sin})
        block = enclosed(case)
        for preset, inner in (("fp32_angle", FORMATS["fp32"]), ("input_all", fmt)):
            r = inner.round
            c, s = (r(a.astype(np.float64)) for a in (cos, sin))
            a, b = (x[:, part].astype(np.float64) for part in (slice(0, 6), slice(6, 12)))
            with np.errstate(all="ignore"):
                halves = [r(r(a * c) - r(b * s)), r(r(a * s) + r(b * c))]
            observed = fmt.store(np.concatenate(halves, axis=1))
            assert worst_ratio(observed, case, block, form_of(preset), fmt) <= 1
            if dtype == "bf16" and preset == "input_all":
                assert worst_ratio(observed, case, block, form_of("fp32_angle"), fmt) > 1


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_the_model_keeps_its_contract(dtype: str) -> None:
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(13)
    x = fmt.store(rng.standard_normal((1, 2, 20, 18)))
    positions = draw_positions(rng, 20) % 5000
    for layout in LAYOUTS:
        case = rope_of(x, positions, layout=layout, rotary_dim=16)
        block = enclosed(case, arb_arithmetic(160) if dtype == "fp64" else None, (0, 1))
        presets = ("fp64",) if dtype == "fp64" else ("fp32_angle", "fp64_angle", "input_table", "input_all")
        for preset in presets:
            form = preset_forms("rope", preset)[0]
            observed = fmt.store(OPS["rope"].model(case, (0, 1), np.arange(20), form)["out"])
            assert 0 < worst_ratio(observed, case, block, form, fmt) <= 1, preset


@pytest.mark.parametrize("preset", ["fp32_angle", "fp64_angle", "input_table", "input_all"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_relative_scores_keep_their_bound(preset: str, dtype: str) -> None:
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(14)
    kernels = [kernel for kernel in KERNELS if kernel.preset == preset]
    for kernel in kernels:
        form = form_for(kernel)
        d = int(rng.choice([8, 64]))
        q, k = (fmt.store(rng.standard_normal((12, d))) for _ in range(2))
        m, n = (rng.integers(0, 3000, 12) for _ in range(2))
        t = int(rng.integers(1, 3000))
        scores = []
        for shift in (0, t):
            left, right = (
                run_kernel(kernel, a, at + shift, 1e4, d, fmt, 0).astype(np.float32) for a, at in ((q, m), (k, n))
            )
            scores.append(np.cumsum(left[:, None] * right[None], axis=2, dtype=np.float32)[:, :, -1].astype(np.float64))
        wide = [a.astype(np.float64) for a in (q, k)]
        bound = bounds_rope.relative_bound(*wide, m, n, t, form, fmt)
        assert (np.abs(scores[1] - scores[0]) <= bound).all(), kernel
        if preset == "fp64_angle" and dtype == "fp32":
            wrong = run_kernel(replace(kernel, angle="fp32"), q, m + t, 1e4, d, fmt, 0).astype(np.float32)
            moved = (wrong.astype(np.float64) @ right.astype(np.float64).T) - scores[0]
            assert (np.abs(moved) > bound).any()
