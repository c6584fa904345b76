"""Scaled rotary frequencies: the formula against plain mpmath loops, enclosures, refusals."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.honest_rope import draw_positions
from meta_tests.kernels.honest_rope_scaling import draw_parameters
from meta_tests.oracle.rope.scaled import DYNAMIC, KINDS, LLAMA3, LONG, PARAMETERS, SECTIONS, YARN, rope_of, three
from meta_tests.oracle.rope.test_bounds import enclosed
from meta_tests.oracle.rope.test_rope_oracle import inside
from meta_tests.witnesses import rope as witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.case import load_case, save_case
from oracle.ops.rope import case as rope_case
from oracle.ops.rope import formula as rope
from oracle.ops.rope import scaling as rope_scaling
from oracle.ops.rope.parameters import read_scaling
from properties.ops.rope.scalings import RELEASED


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
