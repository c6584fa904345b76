"""Scaled rotary frequencies: bounds under attack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meta_tests.kernels.honest_rope import INPUTS, KERNELS, Kernel, draw_positions, run_kernel
from meta_tests.kernels.honest_rope_scaling import WAYS, Maker, draw_parameters, frequencies, magnitude
from meta_tests.oracle.rope.scaled import KINDS, LLAMA3, PARAMETERS, YARN, rope_of, three
from meta_tests.oracle.rope.test_bounds import enclosed, form_for, worst_ratio
from oracle.arithmetic.arb import arb_arithmetic
from oracle.bounds.rope.frequency import frequency_error, magnitude_of
from oracle.bounds.rope.rotation import relative_bound
from oracle.formats import FORMATS
from oracle.ops.rope import case as rope_case
from oracle.ops.rope import formula as rope
from oracle.ops.rope import scaling as rope_scaling
from oracle.ops.rope.parameters import read_scaling


def worst_frequency(
    parameters: dict[str, Any], base: float, d: int, length: int, maker: Maker, *, flat: float | None = None
) -> tuple[float, float]:
    """(frequency error / bound, magnitude error / bound); ``flat``: against plain roundings and that many more."""
    scaling = read_scaling(parameters, base=base, dim=d, rotary_dim=d)
    exact = arb_arithmetic(200)
    with exact.working():
        hi, lo, _ = exact.to_enclosure(rope.frequencies(exact, base, d, scaling=scaling, length=length))
        size = rope_scaling.magnitude(exact, scaling)
        size = None if size is None else [part[0, 0] for part in exact.to_enclosure(size)]
    bound = frequency_error(base, d, scaling, length, maker.fmt)
    if flat is not None:
        bound = frequency_error(base, d, rope_scaling.PLAIN, 0, maker.fmt) + flat * maker.u
    made = frequencies(scaling, base, d, length, maker)
    with np.errstate(invalid="ignore"):
        gap = np.abs((made - hi) - lo) / hi
        found = float(np.where(gap == 0, 0.0, gap / bound).max())
    if size is None:
        return found, 0.0
    allowed = magnitude_of(scaling, maker.u)[1]
    gap_of_size = abs((magnitude(scaling, maker) - size[0]) - size[1]) / size[0]
    return found, gap_of_size / allowed if gap_of_size else 0.0


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_honest_frequency_exceeds_its_bound(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(len(kind))
    for _ in range(60):
        d, base = int(rng.choice([4, 6, 20, 64, 128])), float(rng.choice([1e4, 5e5, 12345.678, 100.0]))
        parameters = draw_parameters(rng, kind, d)
        length = int(rng.choice([10, 64, 65, 4097, 200_000]))
        for way in WAYS:
            for worst in (False, True):
                ratios = worst_frequency(parameters, base, d, length, Maker(FORMATS[dtype], way, rng, worst))
                assert max(ratios) <= 1, (parameters, base, d, length, way, ratios)


@pytest.mark.parametrize("beta", ["beta_fast", "beta_slow"])
def test_a_border_next_to_an_integer_may_fall_to_either_side(beta: str) -> None:
    """A base chosen so that a correction dimension is an integer but for its rounding: float32 rounds it anyhow."""
    fmt, rng, flipped = FORMATS["fp32"], np.random.default_rng(6), 0
    for trained in range(3000, 3040):
        rotations = {"beta_fast": 32, "beta_slow": 1}[beta]
        base = float((trained / (2 * np.pi * rotations)) ** (64 / (2 * 7)))
        parameters = {**YARN, "original_max_position_embeddings": trained}
        ratios = [worst_frequency(parameters, base, 64, 1, Maker(fmt, way, rng))[0] for way in ("host", "narrow")]
        assert max(ratios) <= 1, (parameters, base)
        # Another border is an error of far more than any number of roundings.
        flat = worst_frequency(parameters, base, 64, 1, Maker(fmt, "narrow", rng), flat=8)[0]
        flipped += flat > 100
    assert flipped > 3


def test_a_flat_number_of_roundings_does_not_hold() -> None:
    """Blending magnifies the error of its share, so "12 units more" is wrong for a narrow ramp and a large factor."""
    rng = np.random.default_rng(7)
    parameters = {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "high_freq_factor": 1.2}
    maker = Maker(FORMATS["fp32"], "host", rng)
    worst = [worst_frequency(parameters, base, 128, 1, maker, flat=12)[0] for base in np.linspace(1e5, 1e6, 40)]
    assert max(worst) > 1
    assert max(worst_frequency(parameters, base, 128, 1, maker)[0] for base in np.linspace(1e5, 1e6, 40)) <= 1


def attack(kernel: Kernel, dtype: str, seed: int, *, op: str) -> float:
    """The worst ratio of one honest kernel over families of inputs, rules and positions."""
    fmt, rng, worst = FORMATS[dtype], np.random.default_rng(seed), 0.0
    angle = fmt if kernel.angle == "input" else FORMATS[kernel.angle]
    for family, draw in INPUTS.items():
        d, kind = int(rng.choice([4, 16, 20])), str(rng.choice(KINDS))
        base = 10000.0 if fmt.name == "fp16" else float(rng.choice([1e4, 5e5, 777.7]))
        parameters = draw_parameters(rng, kind, d)
        positions = draw_positions(rng, 12) % (60000 if fmt.name == "fp16" else 2**25)
        if rng.uniform() < 0.3:
            parameters["mrope_section"] = [1, d // 2 - 1, 0]
            positions = np.stack([positions, positions[::-1], positions])
        x = fmt.store(draw(rng, (12, d + 2), fmt))
        case = rope_of(x[None, None], positions, op=op, base=base, rotary_dim=d, scaling=parameters)
        block = enclosed(case, arb_arithmetic(160) if dtype == "fp64" else None)
        how, length = rope_case.rotation(case), rope_case.sequence_length(case, (0, 0))
        maker = Maker(angle, str(rng.choice(WAYS)), rng, kernel.worst)
        compute = Maker(FORMATS["fp64" if kernel.preset == "fp64" else "fp32"], maker.way, rng)
        with np.errstate(all="ignore"):
            theta = frequencies(how.scaling, base, d, length, maker)
        turned = rope_case.pair_positions(case, (0, 0), np.arange(12))
        with np.errstate(all="ignore"):
            observed = run_kernel(
                kernel, x, np.broadcast_to(turned, (12, d // 2)), base, d, fmt, seed, theta=theta,
                size=magnitude(how.scaling, compute), back=op == "rope_backward",
            )  # fmt: skip
        found = worst_ratio(observed, case, block, form_for(kernel), fmt)
        worst = max(worst, found)
        assert found <= 1, (kernel, family, parameters, base, found)
    return worst


@pytest.mark.parametrize("op", ["rope", "rope_backward"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_no_honest_kernel_exceeds_its_bound(dtype: str, op: str) -> None:
    seen = [attack(kernel, dtype, seed, op=op) for kernel in KERNELS for seed in range(2)]
    assert max(seen) > 0.3


@pytest.mark.parametrize("change", ["factor", "magnitude", "sign", "ramp", "axis"])
def test_wrong_parameters_exceed_the_bound(change: str) -> None:
    """The attack can succeed: another factor by 1%, a magnitude by 1%, the sign, the other ramp, another axis."""
    fmt, d = FORMATS["bf16"], 64
    rng = np.random.default_rng(9)
    x = fmt.store(rng.standard_normal((8, d)))
    positions = np.arange(8) * 50 + 300
    parameters = {**YARN, "mrope_section": [10, 11, 11]} if change == "axis" else dict(YARN)
    case = rope_of(x[None, None], three(positions, parameters), op="rope_backward", scaling=parameters)
    how = rope_case.rotation(case)
    used = {
        "factor": {**parameters, "factor": 16.16},
        "ramp": {**parameters, "ramp": "rotations"},
    }.get(change, parameters)
    scaling = read_scaling(used, base=10000.0, dim=d, rotary_dim=d)
    maker = Maker(FORMATS["fp32"], "host", rng)
    turned = rope_case.pair_positions(case, (0, 0), np.arange(8))
    for broken in (False, True):
        theta = frequencies(scaling if broken else how.scaling, 10000.0, d, 0, maker)
        size = magnitude(how.scaling, maker) * (1.01 if broken and change == "magnitude" else 1.0)
        places = np.broadcast_to(positions[:, None], (8, d // 2)) if broken and change == "axis" else turned
        back = not (broken and change == "sign")
        observed = run_kernel(
            KERNELS[0], x, np.broadcast_to(places, (8, d // 2)), 10000.0, d, fmt, 0, theta=theta, size=size, back=back
        )
        ratio = worst_ratio(observed, case, enclosed(case), form_for(KERNELS[0]), fmt)
        assert (ratio > 1) == broken, (change, ratio)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_the_model_keeps_its_contract(dtype: str) -> None:
    fmt, rng = FORMATS[dtype], np.random.default_rng(13)
    for parameters in PARAMETERS:
        positions = three(draw_positions(rng, 8) % 5000, parameters)
        x = fmt.store(rng.standard_normal((1, 1, 8, 8)))
        case = rope_of(x, positions, op="rope_backward", scaling=parameters)
        block = enclosed(case, arb_arithmetic(160) if dtype == "fp64" else None)
        op = next(op for op in rope_case.OPS if op.name == case.op)
        for kernel in (Kernel("fp64"),) if dtype == "fp64" else (KERNELS[0], KERNELS[7], KERNELS[10], KERNELS[-1]):
            form = form_for(kernel)
            observed = fmt.store(op.model(case, (0, 0), np.arange(8), form)["dx"])
            assert worst_ratio(observed, case, block, form, fmt) <= 1, (parameters, kernel)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_relative_scores_keep_their_bound(dtype: str) -> None:
    """Scores of vectors that were turned and multiplied by a magnitude, before and after a shift of both positions."""
    fmt, rng = FORMATS[dtype], np.random.default_rng(15)
    for parameters in (YARN, {**YARN, "attention_factor": 3.0}, LLAMA3, {"rope_type": "linear", "factor": 2.5}):
        scaling = read_scaling(parameters, base=10000.0, dim=64, rotary_dim=64)
        form, maker = form_for(KERNELS[0]), Maker(FORMATS["fp32"], "host", rng)
        theta, size = frequencies(scaling, 10000.0, 64, 0, maker), magnitude(scaling, maker)
        q, k = (fmt.store(rng.standard_normal((12, 64))) for _ in range(2))
        m, n, t = rng.integers(0, 3000, 12), rng.integers(0, 3000, 12), 1234
        scores = []
        for shift in (0, t):
            left, right = (
                run_kernel(KERNELS[0], a, at + shift, 1e4, 64, fmt, 0, theta=theta, size=size).astype(np.float32)
                for a, at in ((q, m), (k, n))
            )
            scores.append(np.cumsum(left[:, None] * right[None], axis=2, dtype=np.float32)[:, :, -1].astype(np.float64))
        wide = [a.astype(np.float64) for a in (q, k)]
        moved = np.abs(scores[1] - scores[0])
        assert (moved <= relative_bound(*wide, m, n, t, form, fmt, scaling=scaling)).all()
        # Another frequency at one of the two places is seen.
        wrong = run_kernel(KERNELS[0], q, m + t, 1e4, 64, fmt, 0, theta=theta * 1.01, size=size).astype(np.float64)
        moved = np.abs(wrong @ right.astype(np.float64).T - scores[0])
        assert (moved > relative_bound(*wide, m, n, t, form, fmt, scaling=scaling)).any()
