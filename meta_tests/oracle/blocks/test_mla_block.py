"""mla_block: a second witness, decoding from the latents, rows alone, refusals."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.honest_mla_block import blocks, run_block
from meta_tests.oracle.blocks.mla_cases import KINDS, case_of, enclosed, form_of, options_of, wide
from meta_tests.witnesses import rope as rope_witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS
from oracle.ops.blocks import mla as mla_block
from oracle.ops.blocks import mla_case as mla_block_case


def witness(case: Case) -> list[list[Any]]:
    """y in plain mpmath loops, one sequence."""

    def exact(a: Any) -> Any:
        return mpmath.mpf(float(a)) if np.ndim(a) == 0 else [exact(row) for row in a]

    a = {n: exact(v) for n, v in wide(case).items() if n != "positions"}
    positions = [int(p) for p in case.arrays["positions"]]
    options = options_of(case)
    base, eps = mpmath.mpf(options.get("base", 10000.0)), mpmath.mpf(options.get("eps", 1e-6))

    def linear(row: list[Any], weight: list[list[Any]]) -> list[Any]:
        return [mpmath.fsum(u * v for u, v in zip(row, w, strict=True)) for w in weight]

    def norm(row: list[Any], gain: Any) -> list[Any]:
        if gain is None:
            return row
        root = mpmath.sqrt(mpmath.fsum(v * v for v in row) / len(row) + eps)
        return [v / root * mpmath.mpf(float(g)) for v, g in zip(row, gain, strict=True)]

    scaling, length = options.get("scaling"), max(positions) + 1

    def turned(row: list[Any], at: int) -> list[Any]:
        return rope_witness.turned(row, [at], len(row), base, scaling, length, layout=options["layout"])

    def dot(u: list[Any], v: list[Any]) -> Any:
        return mpmath.fsum(p * q for p, q in zip(u, v, strict=True))

    c_kv = [norm(linear(row, a["w_dkv"]), options.get("norm_kv")) for row in a["x"]]
    k_pe = [turned(linear(row, a["w_kr"]), at) for row, at in zip(a["x"], positions, strict=True)]
    c_q = [norm(linear(row, a["w_dq"]), options.get("norm_q")) for row in a["x"]]
    width = len(a["w_uk"][0]) + len(a["w_kr"])
    scale = mpmath.mpf(options["scale"]) if "scale" in options else 1 / mpmath.sqrt(width)
    if "scale" not in options and scaling is not None and scaling.get("mscale_all_dim"):
        # Written out as DeepSeek's yarn_get_mscale has it.
        m = mpmath.mpf("0.1") * mpmath.mpf(scaling["mscale_all_dim"]) * mpmath.log(mpmath.mpf(scaling["factor"])) + 1
        scale = scale * m * m if scaling["factor"] > 1 else scale
    result = []
    for i, at in enumerate(positions):
        joined: list[Any] = []
        for h in range(len(a["w_uk"])):
            nope, rope = linear(c_q[i], a["w_uq"][h]), turned(linear(c_q[i], a["w_qr"][h]), at)
            weights = []
            for j in range(i + 1):
                score = dot(nope, linear(c_kv[j], a["w_uk"][h])) + dot(rope, k_pe[j])
                weights.append(mpmath.exp(scale * score))
            total = mpmath.fsum(weights)
            values = [linear(c_kv[j], a["w_uv"][h]) for j in range(i + 1)]
            joined += [dot(weights, [v[c] for v in values]) / total for c in range(len(values[0]))]
        result.append(linear(joined, a["w_o"]))
    return result


WITNESSED = ("normal", "norms", "far positions", "cancelling", "deepseek", *(f"scaled {kind}" for kind in KINDS))


def witnessed(family: str) -> Case:
    if not family.startswith("scaled"):
        return case_of(family, FORMATS["bf16"], np.random.default_rng([2, len(family)]))
    kind, drawn = family.split()[1], (case_of("scaled", FORMATS["bf16"], np.random.default_rng(n)) for n in range(99))
    return next(c for c in drawn if c.options["scaling"]["rope_type"] == kind and c.arrays["x"].shape[1] > 2)


@pytest.mark.parametrize("family", WITNESSED)
def test_enclosures_hold_the_second_witness_and_each_other(family: str) -> None:
    case = witnessed(family)
    length = min(case.arrays["x"].shape[1], 5)
    case = case.with_arrays(x=case.arrays["x"][:, :length], positions=case.arrays["positions"][:length])
    parts = [enclose(case, ar=ar)[0].part("out") for ar in (BallArithmetic(), arb_arithmetic(200), mp_arithmetic(300))]
    with mpmath.workprec(300):
        exact = witness(case)
        for part in parts:
            for i, row in enumerate(exact):
                for j, value in enumerate(row):
                    middle = mpmath.mpf(float(part.hi[i, j])) + mpmath.mpf(float(part.lo[i, j]))
                    assert abs(middle - value) <= part.rad[i, j] + abs(value) * mpmath.mpf(2) ** -100
    ball, fine, _ = parts
    assert (np.abs((ball.hi - fine.hi) + (ball.lo - fine.lo)) <= ball.rad + fine.rad).all()


@pytest.mark.parametrize("form", ["materialised", "absorbed"])
def test_rows_one_by_one_from_the_latents_are_those_of_the_whole(form: str) -> None:
    """The same real numbers: mp shows it to its last digits, whatever the form of either side."""
    case = case_of("norms", FORMATS["bf16"], np.random.default_rng(3))
    length = case.arrays["x"].shape[1]
    ar = mp_arithmetic(300)
    s = mla_block_case.sequence(case, (0,), np.arange(length))
    with ar.working():
        weights, layout = mla_block_case.weights_of(ar, case, s), str(case.options["layout"])
        kept = mla_block.latents(ar, mla_block_case.sides(ar, case, s)[1], weights, layout)
        whole = enclose(case, ar=ar)[0].part("out")
        for i in range(length):
            row = mla_block_case.sequence(case, (0,), np.array([i]))
            seen = mla_block.Latents(ar.rows(kept.c_kv, 0, i + 1), ar.rows(kept.k_pe, 0, i + 1))
            _, out = mla_block.from_latents(
                ar,
                mla_block_case.sides(ar, case, row)[0],
                seen,
                weights,
                scale=mla_block_case.scale_value(ar, case),
                layout=layout,
                visible=np.ones((1, i + 1), dtype=bool),
                form=form,
            )
            hi, lo, _ = ar.to_enclosure(out)
            assert np.abs((hi - whole.hi[i]) + (lo - whole.lo[i])).max() < 1e-30


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_honest_decoding_agrees_with_prefill_within_both_bounds(dtype: str) -> None:
    fmt, made = FORMATS[dtype], blocks(dtype)
    prefill, decode = made["materialised flash"], made["absorbed row by row"]
    for seed in range(4):
        case = case_of("norms", fmt, np.random.default_rng(seed))
        outs = [run_block(k, dtype, wide(case), options_of(case)) for k in (prefill, decode)]
        rooms = [enclosed(case, form_of(k, fmt), fmt)[1].bound for k in (prefill, decode)]
        assert (np.abs(outs[0] - outs[1]) <= rooms[0] + rooms[1]).all()


def test_some_rows_alone_are_those_of_the_whole() -> None:
    case = case_of("norms", FORMATS["fp16"], np.random.default_rng(3))
    length = case.arrays["x"].shape[1]
    rows = np.array([0, length - 1])
    whole, some = enclose(case)[0].part("out"), enclose(case, rows=rows)[0].part("out")
    assert (np.abs(whole.hi[rows] - some.hi) <= whole.rad[rows] + some.rad).all()
    refined = refine(case, enclose(case)[0], np.arange(length) == length - 1, 256)
    assert refined.part("out").rad[-1].max() < 1e-20


def test_what_a_row_does_not_read_does_not_spoil_it() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(3))
    length = case.arrays["x"].shape[1]
    x = case.arrays["x"].copy()
    x[0, 1, 0] = np.nan
    assert enclose(case.with_arrays(x=x))[0].undefined.tolist() == [i >= 1 for i in range(length)]
    gain = np.full(case.arrays["w_dq"].shape[0], np.inf, np.float32)
    assert enclose(case.with_options(norm_q=gain))[0].undefined.all()


def test_wrong_cases_are_named() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(2))
    half = case.arrays["w_kr"].shape[0] // 2
    for options, message in (
        ({"layout": "both"}, "unknown layout 'both'"),
        ({"base": 0.0}, "base must be a positive number"),
        ({"eps": -1.0}, "eps must be a positive number"),
        ({"norm_q": np.ones(99, np.float32)}, "norm_q must be an array"),
        ({"num_heads": 99}, "num_heads is 99"),
        ({"causal": True}, "unknown option 'causal'"),
        ({"scaling": {"rope_type": "ntk"}}, "unknown rope_type 'ntk'"),
        ({"scaling": 4.0}, "scaling must be None or a dict"),
        ({"scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}, "contradicts the option base"),
        ({"scaling": {"rope_type": "default", "mrope_section": [half, 0, 0]}}, "needs three positions"),
        (
            {
                "scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.0,
                    "mscale_all_dim": "x",
                }
            },
            r"scaling\['mscale_all_dim'\] = 'x' must",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            enclose(case.with_options(**options))
    for name in case.arrays:
        with pytest.raises(ValueError, match=name):
            enclose(case.with_arrays(**{name: case.arrays[name][..., None]}))
