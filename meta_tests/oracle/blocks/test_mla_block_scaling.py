"""mla_block with scaled rotary frequencies: the scale and the length, the bound against honest blocks and broken ones.

The enclosures against a second witness, and the families of drawn inputs: `test_mla_block`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meta_tests.kernels.honest_mla_block import blocks
from meta_tests.oracle.blocks.mla_cases import KINDS, case_of, parameters_of, ratio
from oracle.bounds.rope import rotation as rope_bounds
from oracle.bounds.rope.frequency import frequency_error
from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.blocks import mla_case as mla_block_case
from oracle.ops.rope.scaling import PLAIN


def test_yarns_factor_is_in_the_scale_once_and_squared() -> None:
    case = case_of("deepseek", FORMATS["fp32"], np.random.default_rng(1))
    yarn = {**case.options["scaling"], "factor": 40.0, "mscale_all_dim": 0.707}
    width = case.arrays["w_uk"].shape[1] + case.arrays["w_kr"].shape[0]
    plain, m = width**-0.5, 1 + 0.0707 * np.log(40.0)
    for more, expected in (
        ({}, plain * m**2),
        # Tables are as large as they are by another rule; the scale is not part of it.
        ({"attention_factor": 3.0}, plain * m**2),
        ({"mscale": None}, plain * m**2),
        ({"mscale_all_dim": 0}, plain),
        ({"mscale_all_dim": None}, plain),
        ({"factor": 0.5}, plain),
    ):
        given = case.with_options(scaling={**yarn, **more})
        assert mla_block_case.scale_float(given) == pytest.approx(expected, rel=1e-14), more
    assert mla_block_case.scale_float(case.with_options(scaling=yarn, scale=0.25)) == 0.25


def test_lengths_are_those_of_the_call_or_of_the_sequence() -> None:
    case = case_of("scaled", FORMATS["fp32"], np.random.default_rng(0))
    x = np.concatenate([case.arrays["x"][:, :2]] * 2)
    both = case.with_arrays(x=x, positions=np.array([[0, 1], [70, 400]]))
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64}
    for name, lengths in (("call", (401, 401)), ("sequence", (2, 401)), (99, (99, 99))):
        given = both.with_options(scaling={**dynamic, "seq_len": name})
        found = [
            mla_block_case.sequence_length(given, mla_block_case.sequence(given, (b,), np.arange(2))) for b in (0, 1)
        ]
        assert tuple(found) == lengths


def angles_alone(rng: np.random.Generator, kind: str, *, d: int = 8) -> Case:
    """Two rows whose weights follow from the rotary part alone: the second, far away, sees two opposite values."""
    fmt, base = FORMATS["fp32"], 10000.0
    small = {"w_kr": (d, 4), "w_dq": (4, 4), "w_qr": (1, d, 4), "w_dkv": (1, 4)}
    w = {name: rng.standard_normal(shape) for name, shape in small.items()}
    w |= {"w_uk": np.zeros((1, 1, 1)), "w_uq": np.zeros((1, 1, 4)), "w_uv": np.ones((1, 1, 1)), "w_o": np.ones((1, 1))}
    x = rng.standard_normal(4)
    x = np.stack([x, -x + 0.1 * rng.standard_normal(4)])[None]
    arrays = {n: fmt.store(a) for n, a in {"x": x, **w}.items()}
    arrays["positions"] = np.array([0, int(rng.integers(20_000, 60_000))])
    return Case("mla_block", arrays, {"scaling": parameters_of(rng, kind, d, base), "base": base, "scale": 0.3})


@pytest.mark.parametrize("kind", KINDS)
def test_angles_of_scaled_frequencies_are_within_and_near_their_bound(kind: str) -> None:
    fmt = FORMATS["fp32"]
    kernels = [blocks("fp32")[name] for name in ("materialised fp32", "materialised narrow", "exponent")]
    cases = [angles_alone(np.random.default_rng([seed, len(kind)]), kind) for seed in range(12)]
    found = [ratio(kernel, case, fmt, start=1) for kernel in kernels for case in cases]
    assert 0.02 < max(found) <= 1, max(found)


def test_the_error_of_scaled_frequencies_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where frequencies are blended steeply, plain ones' error is too small a bound for those of honest kernels."""
    fmt, kernel, cases = FORMATS["fp32"], blocks("fp32")["exponent"], []
    steep = {"rope_type": "llama3", "factor": 64.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0}
    for seed in range(24):
        case = angles_alone(np.random.default_rng([seed, 77]), "linear", d=4)
        # The second pair, halfway down the ramp, is all there is of the query.
        w_qr = case.arrays["w_qr"].copy()
        w_qr[:, ::2] = 0
        base = float((8192 / (2 * np.pi * (1.002 + 0.0002 * seed))) ** 2)
        options = {"scaling": {**steep, "high_freq_factor": 1.01}, "base": base}
        cases.append(case.with_arrays(w_qr=w_qr).with_options(**options))
    assert max(ratio(kernel, case, fmt, start=1) for case in cases) <= 1
    plain = lambda base, dim, scaling, length, fmt: frequency_error(base, dim, PLAIN, 0, fmt)  # noqa: E731
    monkeypatch.setattr(rope_bounds, "frequency_error", plain)
    most = max(ratio(kernel, case, fmt, start=1) for case in cases)
    assert most > 1, most


@pytest.mark.parametrize("part", ["scaling", "magnitude", "softmax factor", "square"])
def test_a_block_that_leaves_part_of_the_scaling_out_exceeds_it(part: str) -> None:
    for dtype in ("fp32", "bf16"):
        fmt, kernel = FORMATS[dtype], blocks(dtype)["absorbed fp32"]
        case = case_of("deepseek", fmt, np.random.default_rng(21))
        case = case.with_options(
            scaling={**case.options["scaling"], "factor": 40.0, "mscale_all_dim": 1.0, "mscale": 0.1}
        )
        assert ratio(kernel, case, fmt) <= 1 < ratio(replace(kernel, part=part), case, fmt)
