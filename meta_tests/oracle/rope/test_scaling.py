"""Scaled rotary frequencies: the formula against plain mpmath loops, enclosures, refusals, and bounds under attack."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.honest_rope import INPUTS, KERNELS, Kernel, draw_positions, run_kernel
from meta_tests.kernels.honest_rope_scaling import WAYS, Maker, draw_parameters, frequencies, magnitude
from meta_tests.oracle.rope.test_bounds import enclosed, form_for, worst_ratio
from meta_tests.oracle.rope.test_rope_oracle import inside
from meta_tests.witnesses import rope as witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.bounds.rope.frequency import frequency_error, magnitude_of
from oracle.bounds.rope.rotation import relative_bound
from oracle.case import Case, load_case, save_case
from oracle.formats import FORMATS
from oracle.ops.rope import case as rope_case
from oracle.ops.rope import formula as rope
from oracle.ops.rope import scaling as rope_scaling
from oracle.ops.rope.parameters import read_scaling
from properties.ops.rope.scalings import RELEASED

KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 32.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.5, 10.0, 40.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 2, 1]}
# Every rule and every key, over 8 rotated entries.
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.3},
    DYNAMIC,
    {**DYNAMIC, "factor": 1.0},
    {**DYNAMIC, "seq_len": 500},
    YARN,
    {**YARN, "ramp": "rotations"},
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 9.0, "beta_slow": 0.7, "truncate": False},
    {**YARN, "attention_factor": 0.9},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.25},
    {**YARN, "mscale": 0.707},
    {**YARN, "mscale": 0.707, "mscale_rule": "deepseek"},
    {**YARN, "mscale_all_dim": 0.5, "mscale_rule": "deepseek"},
    {"rope_type": "yarn", "original_max_position_embeddings": 2048, "max_position_embeddings": 6000},
    {**YARN, "factor": 1.0},
    LLAMA3,
    {**LLAMA3, "high_freq_factor": 32.0, "low_freq_factor": 0.3},
    LONG,
    {**LONG, "attention_factor": 1.3},
    {**LONG, "factor": 0.5},
    {**LONG, "seq_len": 65},
    SECTIONS,
    {**SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    {**YARN, "mrope_section": [0, 4, 0]},
)


def rope_of(x: Any, positions: Any, *, op: str = "rope", **options: Any) -> Case:
    return Case(op, {"dy" if op == "rope_backward" else "x": x, "positions": positions}, options)


def three(positions: Any, parameters: dict[str, Any]) -> Any:
    """The positions, on three axes where there are sections."""
    if "mrope_section" not in parameters:
        return positions
    return np.stack([positions, positions // 2 + 1, 3 * positions])


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("op", ["rope", "rope_backward"])
@pytest.mark.parametrize("last", [63, 64, 5000])
def test_formula_equals_the_second_witness(op: str, last: int, parameters: dict[str, Any]) -> None:
    """At both sides of the trained length 64 of the rules that depend on it; partly rotated, both layouts."""
    at = np.array([0, 1, 17, last], dtype=np.int64)
    x = np.random.default_rng(last).standard_normal((1, 1, len(at), 10)).astype(np.float32)
    length = parameters.get("seq_len", (3 if "mrope_section" in parameters else 1) * last + 1)
    for layout, base in (("half", 10000.0), ("interleaved", 77.7)):
        positions = three(at, parameters)
        case = rope_of(x, positions, op=op, layout=layout, base=base, rotary_dim=8, scaling=parameters)
        found = enclosed(case, mp_arithmetic(250)).values[rope_case.output_name(case)]
        with mpmath.workprec(300):
            for i in range(len(at)):
                row = [mpmath.mpf(float(v)) for v in x[0, 0, i]]
                places = [int(p) for p in positions[..., i].reshape(-1)] * (1 if positions.ndim == 2 else 3)
                expected = witness.turned(
                    row, places, 8, base, parameters, length, layout=layout, back=op == "rope_backward"
                )
                for got, want in zip(found[i], expected, strict=True):
                    assert abs(mpmath.mpf(got) - want) <= mpmath.mpf(2) ** -200


@pytest.mark.parametrize("known", RELEASED, ids=lambda known: known.name)
def test_released_configurations(known: Any) -> None:
    scaling = read_scaling(known.scaling, base=known.base, dim=known.dims, rotary_dim=known.dims)
    theta = rope.frequencies(mp_arithmetic(200), known.base, known.dims, scaling=scaling)[0]
    with mpmath.workprec(220):
        for i in range(known.dims // 2):
            expected = witness.frequency(i, known.dims, known.base, known.scaling, 1)
            assert abs(mpmath.mpf(theta[i]) / expected - 1) < mpmath.mpf(2) ** -180


def test_drawn_parameters() -> None:
    """Thousands of frequencies and hundreds of magnitudes of every rule, at two precisions of arb and in mp."""
    rng = np.random.default_rng(0)
    seen = 0
    for step in range(200):
        kind, d = KINDS[step % 5], int(rng.choice([4, 10, 64]))
        base = float(rng.choice([100.0, 10000.0, 123456.7]))
        parameters = draw_parameters(rng, kind, d)
        scaling = read_scaling(parameters, base=base, dim=d, rotary_dim=d)
        length = int(rng.choice([1, scaling.length, scaling.length + 1, 10**6]))
        exact = arb_arithmetic(160)
        with exact.working(), mpmath.workprec(200):
            theta = exact.to_enclosure(rope.frequencies(exact, base, d, scaling=scaling, length=length))
            size = rope_scaling.magnitude(exact, scaling)
            expected = [witness.frequency(i, d, base, parameters, length) for i in range(d // 2)]
            pairs = [(tuple(part[0, i] for part in theta), want) for i, want in enumerate(expected)]
            if size is not None:
                pairs.append((tuple(part[0, 0] for part in exact.to_enclosure(size)), witness.size(parameters)))
            for (hi, lo, rad), want in pairs:
                assert (
                    abs(mpmath.mpf(float(hi)) + mpmath.mpf(float(lo)) - want) <= rad + abs(want) * mpmath.mpf(2) ** -150
                )
                seen += 1
    assert seen > 2500


def test_every_arithmetic_encloses_the_definition() -> None:
    rng = np.random.default_rng(3)
    positions = np.concatenate([np.array([0, 1, 63, 64]), draw_positions(rng, 6)])
    for parameters in PARAMETERS:
        x = rng.standard_normal((1, 1, len(positions), 8)).astype(np.float32)
        case = rope_of(x, three(positions, parameters), layout="interleaved", scaling=parameters)
        exact = enclosed(case, mp_arithmetic(300))
        for block in (enclosed(case, arb_arithmetic(160)), enclosed(case)):
            for part in ("cos", "sin", "out"):
                assert inside(exact.values[part], block, part).all(), (parameters, part, block.ar.name)
        assert enclosed(case).part("out").rad.max() < 1e-13


def test_lengths_of_the_call_of_each_sequence_and_as_stated() -> None:
    x = np.ones((2, 1, 2, 8), np.float32)
    both = np.array([[0, 10], [0, 300]])
    by_call = rope_of(x, both, scaling=DYNAMIC)
    by_sequence = rope_of(x, both, scaling={**DYNAMIC, "seq_len": "sequence"})
    assert [rope_case.sequence_length(by_call, (b, 0)) for b in (0, 1)] == [301, 301]
    assert [rope_case.sequence_length(by_sequence, (b, 0)) for b in (0, 1)] == [11, 301]
    assert rope_case.sequence_length(rope_of(x, both, scaling={**DYNAMIC, "seq_len": 65}), (0, 0)) == 65
    assert rope_case.sequence_length(rope_of(x, both, scaling=YARN), (0, 0)) == 0
    plain = enclosed(rope_of(x, both)).part("out").hi
    assert np.array_equal(enclosed(by_sequence).part("out").hi, plain)
    assert not np.array_equal(enclosed(by_call).part("out").hi, plain)


def test_the_gradient_is_the_transposed_map() -> None:
    """<dy, A R_m x> = <A R_m^T dy, x>, to the last digits, for every rule."""
    rng = np.random.default_rng(4)
    positions = np.array([3, 700, 2**20], dtype=np.int64)
    x, dy = (rng.standard_normal((1, 1, 3, 8)) for _ in range(2))
    for parameters in PARAMETERS:
        options = {"scaling": parameters, "layout": "interleaved"}
        at = three(positions, parameters)
        ar = mp_arithmetic(200)
        y = enclosed(rope_of(x, at, **options), ar).values["out"]
        dx = enclosed(rope_of(dy, at, op="rope_backward", **options), ar).values["dx"]
        with mpmath.workprec(200):
            for i in range(3):
                gap = mpmath.fdot(dy[0, 0, i], y[i]) - mpmath.fdot(x[0, 0, i], dx[i])
                assert abs(gap) < mpmath.mpf(2) ** -180


def test_a_case_with_scaling_survives_its_file(tmp_path: Any) -> None:
    case = rope_of(np.ones((1, 1, 2, 8), np.float32), np.arange(2), scaling=LONG)
    save_case(case, tmp_path / "case")
    again = load_case(tmp_path / "case")
    assert again.options == case.options
    assert again.digest() == case.digest()


# Refusals: the key and the value are named, before any target is called.


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", r"scaling must be None or a dict with 'rope_type', got 'yarn'"),
        ({"factor": 2.0}, r"scaling must be None or a dict with 'rope_type', got \{'factor': 2.0\}"),
        ({"rope_type": "ntk"}, r"unknown rope_type 'ntk' in scaling; known: default, linear"),
        ({"rope_type": "linear"}, r"needs 'factor', got \{'rope_type': 'linear'\}"),
        ({"rope_type": "linear", "factor": 0}, r"scaling\['factor'\] = 0 must be a positive number"),
        ({"rope_type": "linear", "factor": True}, r"scaling\['factor'\] = True must be"),
        ({"rope_type": "linear", "factor": float("nan")}, r"scaling\['factor'\] = nan must be"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, r"unknown key 'beta_fast' \(value 3.0\)"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}, r"\['rope_theta'\] = 5.0 contradicts .*base"),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
            r"scaling\['partial_rotary_factor'\] = 0.5 rotates 4 of 8 entries, (but )?rotary_dim is 8",
        ),
        ({**DYNAMIC, "factor": 0.5}, r"scaling\['factor'\] = 0.5 must be at least 1"),
        ({**DYNAMIC, "max_position_embeddings": 2.5}, r"scaling\['max_position_embeddings'\] = 2.5 must be an integer"),
        ({**DYNAMIC, "seq_len": "mine"}, r"scaling\['seq_len'\] = 'mine' is unknown; known: call, sequence"),
        ({**DYNAMIC, "seq_len": 0}, r"scaling\['seq_len'\] = 0 must be an integer of at least 1"),
        ({"rope_type": "yarn", "factor": 2.0}, r"needs 'original_max_position_embeddings'"),
        ({**YARN, "factor": None}, r"needs 'factor'"),
        ({**YARN, "beta_fast": 1.0}, r"scaling\['beta_fast'\] = 1.0 must be larger than beta_slow = 1"),
        ({**YARN, "ramp": "cubic"}, r"scaling\['ramp'\] = 'cubic' is unknown; known: dimension, rotations"),
        ({**YARN, "truncate": 1}, r"scaling\['truncate'\] = 1 must be True or False"),
        ({**YARN, "mscale_rule": "mine"}, r"scaling\['mscale_rule'\] = 'mine' is unknown"),
        ({**YARN, "mscale": -1.0, "mscale_all_dim": 1.0}, r"scaling\['mscale'\] = -1.0 must be"),
        ({**YARN, "attention_factor": -0.5}, r"scaling\['attention_factor'\] = -0.5 must be"),
        (
            {**YARN, "original_max_position_embeddings": 2, "beta_slow": 20.0},
            r"embeddings'\] = 2 leaves no ramp among 4 pairs",
        ),
        ({**YARN, "original_max_position_embeddings": 6, "truncate": False}, r"embeddings'\] = 6 leaves no ramp"),
        ({**LLAMA3, "low_freq_factor": 4.0}, r"scaling\['low_freq_factor'\] = 4.0 must be below high_freq_factor = 4"),
        ({**LONG, "long_factor": [1.0] * 3}, r"\['long_factor'\] = \[1.0, 1.0, 1.0\] must be a list of .* 4 numbers"),
        ({**LONG, "short_factor": [1.0, 0.0, 1.0, 1.0]}, r"must hold positive numbers, not 0.0"),
        ({**LONG, "factor": None}, r"longrope needs 'factor', 'max_position_embeddings' or 'attention_factor'"),
        ({**LONG, "original_max_position_embeddings": 1}, r"embeddings'\] = 1 has no logarithm"),
        ({**SECTIONS, "mrope_section": [1, 1, 1]}, r"scaling\['mrope_section'\] = \[1, 1, 1\] sums up to 3, .* is 4"),
        ({**SECTIONS, "mrope_section": [2, 2]}, r"scaling\['mrope_section'\] = \[2, 2\] must be three numbers"),
        (
            {**SECTIONS, "mrope_section": [0, 3, 1], "mrope_interleaved": True},
            r"scaling\['mrope_section'\] = \[0, 3, 1\] cannot be interleaved in 4 pairs: they would be \[2, 1, 1\]",
        ),
        ({"rope_type": "default", "mrope_interleaved": True}, r"scaling\['mrope_interleaved'\] = True needs"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(scaling: Any, message: str) -> None:
    sections = isinstance(scaling, dict) and "mrope_section" in scaling
    positions = np.zeros((3, 2) if sections else 2, dtype=np.int64)
    case = rope_of(np.ones((1, 1, 2, 8), np.float32), positions, scaling=scaling)
    with pytest.raises(ValueError, match=message):
        rope_case.OPS[0].blocks(case)


def test_positions_must_fit_the_sections() -> None:
    x = np.ones((3, 1, 2, 8), np.float32)
    for shape in ((2,), (2, 2), (3, 3), (3, 1, 2)):
        with pytest.raises(ValueError, match=r"positions must be \[3, S\] or \[3, B, S\] with mrope_section"):
            rope_case.OPS[0].blocks(rope_of(x, np.zeros(shape, dtype=np.int64), scaling=SECTIONS))
    with pytest.raises(ValueError, match=r"positions must be \[S\] or \[B, S\]"):
        rope_case.OPS[0].blocks(rope_of(x, np.zeros((3, 3, 2), dtype=np.int64)))


# Bounds.


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
