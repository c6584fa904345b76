"""mla_block: a second witness, decoding from the latents, the bound against honest blocks and broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_mla_block import BlockKernel, blocks, run_block
from meta_tests.kernels.honest_rope_scaling import draw_parameters
from meta_tests.witnesses import rope as rope_witness
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.bounds.blocks import mla as bounded
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.contract.presets import declared_forms, preset_forms
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Format
from oracle.ops.blocks import mla as mla_block
from oracle.ops.blocks import mla_case as mla_block_case
from oracle.ops.rope.parameters import read_scaling

Array = NDArray[Any]
FAMILIES = (
    "normal",
    "norms",
    "tiny x",
    "large x",
    "far positions",
    "peaked",
    "outliers",
    "one row",
    "cancelling",
    "eps",
    "scaled",
    "deepseek",
    "scaled beyond",
)
KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")


def case_of(family: str, fmt: Format, rng: np.random.Generator) -> Case:
    pick = rng.choice
    length, heads = int(pick([2, 5, 17, 33])), int(pick([1, 2, 3]))
    width, d_c, d_cq = int(pick([4, 12])), int(pick([3, 16])), int(pick([2, 8]))
    d_h, d_v, d_r = int(pick([1, 8])), int(pick([2, 8])), int(pick([2, 8]))
    d_r = int(pick([4, 12])) if family in ("scaled", "deepseek", "scaled beyond") else d_r
    length = 1 if family == "one row" else length
    shapes = {
        "w_dkv": (d_c, width),
        "w_uk": (heads, d_h, d_c),
        "w_uv": (heads, d_v, d_c),
        "w_kr": (d_r, width),
        "w_dq": (d_cq, width),
        "w_uq": (heads, d_h, d_cq),
        "w_qr": (heads, d_r, d_cq),
        "w_o": (5, heads * d_v),
    }
    w = {n: rng.standard_normal(s) / np.sqrt(s[-1]) for n, s in shapes.items()}
    x, positions = rng.standard_normal((1, length, width)), np.arange(length, dtype=np.int64)
    options: dict[str, Any] = {"layout": str(pick(["half", "interleaved"]))}
    match family:
        case "norms" | "eps":
            options |= {
                "norm_kv": fmt.store(1 + 0.2 * rng.standard_normal(d_c)),
                "norm_q": fmt.store(1 + 0.2 * rng.standard_normal(d_cq)),
            }
            if family == "eps":
                options["eps"], x = 1e-3, x * 0.03
        case "tiny x":
            x = x * 1e-3
        case "large x":
            x, options["scale"] = x * 30, 1e-3
        case "far positions":
            positions, options["base"] = positions + int(pick([100, 4000])), float(pick([1e4, 500.0]))
        case "scaled":
            options["base"] = float(pick([1e4, 5e5, 777.7]))
            options["scaling"] = parameters_of(rng, str(pick(KINDS)), d_r, options["base"])
            positions = positions + int(pick([0, 63, 4090]))
        case "scaled beyond":
            # Small x keeps the softmax open, so that angles that differ a little move the output.
            options["base"], x = 1e4, x * 0.5
            options["scaling"] = parameters_of(rng, str(pick(KINDS)), d_r, 1e4)
            positions = np.sort(rng.integers(0, int(pick([10_000, 200_000])), length))
        case "deepseek":
            options["scaling"] = {
                "rope_type": "yarn", "factor": float(pick([40.0, 4.0])), "original_max_position_embeddings": 64,
                "beta_fast": 8, "mscale_all_dim": float(pick([1.0, 0.707])), "mscale": float(pick([1.0, 0.1])),
            }  # fmt: skip
            positions = positions + int(pick([0, 60, 500]))
        case "peaked":
            w["w_uq"], w["w_qr"] = w["w_uq"] * 8, w["w_qr"] * 8
        case "outliers":
            x = x * np.where(rng.random(x.shape) < 0.1, 30, 1)
        case "cancelling":
            x[..., 1::2] = x[..., 0::2]
            w["w_dkv"][:, 1::2] = -w["w_dkv"][:, 0::2] * (1 + 2.0**-8)
    arrays = {"x": fmt.store(x), "positions": positions, **{n: fmt.store(a) for n, a in w.items()}}
    return Case("mla_block", arrays, options)


def parameters_of(rng: np.random.Generator, kind: str, dim: int, base: float) -> dict[str, Any]:
    """Drawn parameters that make sense for so few pairs."""
    while True:
        parameters = draw_parameters(rng, kind, dim)
        try:
            read_scaling(parameters, base=base, dim=dim, rotary_dim=dim)
        except ValueError as reason:
            assert "leaves no ramp" in str(reason)
            continue
        return parameters


def wide(case: Case) -> dict[str, Array]:
    return {
        n: a if n == "positions" else a.astype(np.float64) for n, a in {**case.arrays, "x": case.arrays["x"][0]}.items()
    }


def options_of(case: Case) -> dict[str, Any]:
    return {n: v.astype(np.float64) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}


def form_of(kernel: BlockKernel, fmt: Format, contract: dict[str, Any] | None = None) -> Contract:
    core = kernel.core
    return next(
        f
        for f in declared_forms("mla_block", dict(contract or kernel.contract), fmt.name)
        if (f.form, f.normalised_p, f.splits > 1, f.row_sum == "rounded", f.lag)
        == (core.form, core.normalised, core.splits > 1, core.rounded_sum, core.lag)
    )


def enclosed(case: Case, form: Contract, fmt: Format) -> tuple[Block, Any]:
    block = enclose(case)[0]
    for precision in (128, 512):
        promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
        coarse = ~(block.part("out").rad <= promise.bound / 1000).all(axis=1)
        if not coarse.any():
            break
        block = refine(case, block, coarse, precision)
    return block, bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]


def ratio(
    kernel: BlockKernel, case: Case, fmt: Format, contract: dict[str, Any] | None = None, *, start: int = 0
) -> float:
    """The worst of all rows from ``start`` on."""
    block, promise = enclosed(case, form_of(kernel, fmt, contract), fmt)
    y = run_block(kernel, fmt.name, wide(case), options_of(case))
    part = block.part("out")
    with np.errstate(all="ignore"):
        certain = np.maximum(part.distance(y) - part.rad, 0.0)
        found = np.where(certain > 0, certain / promise.bound, 0.0)
    found = np.where(np.isfinite(y), found, np.inf)
    return float(np.where(promise.may_overflow & ~np.isfinite(y), 0.0, found)[start:].max())


def worst(kernel: BlockKernel, dtype: str, seeds: range, contract: dict[str, Any] | None = None) -> float:
    fmt, most = FORMATS[dtype], 0.0
    for place, family in enumerate(FAMILIES):
        for seed in seeds:
            most = max(most, ratio(kernel, case_of(family, fmt, np.random.default_rng([seed, place])), fmt, contract))
    return most


ROWS = [(dtype, name) for dtype in ("fp64", "fp32", "fp16", "bf16") for name in blocks(dtype)]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_no_honest_block_exceeds_its_bound(dtype: str) -> None:
    found = {name: worst(kernel, dtype, range(1)) for name, kernel in blocks(dtype).items()}
    assert max(found.values()) <= 1, found
    assert min(found.values()) > 0.01, found
    # In fp64 the enclosures of q, k and v, made in float64 themselves, weigh as much as the kernel's own errors.
    assert max(found.values()) > (0.02 if dtype == "fp64" else 0.05), found


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "name"), ROWS)
def test_no_honest_block_exceeds_its_bound_at_length(dtype: str, name: str) -> None:
    most = worst(blocks(dtype)[name], dtype, range(1, 16))
    assert most <= 1, most


def test_broken_promises_exceed_it() -> None:
    stored = blocks("bf16")["materialised flash"]
    assert worst(stored, "bf16", range(2), {"preset": "fp32", "form": "materialised"}) > 1
    cached = blocks("fp16")["absorbed fp8 cache"]
    assert worst(cached, "fp16", range(2), {"preset": "flash", "form": "absorbed"}) > 1
    assert worst(blocks("fp32")["tf32"], "fp32", range(1), {"preset": "fp32", "form": "materialised"}) > 1
    coarse = replace(blocks("fp16")["materialised flash"], between="bf16", table="bf16")
    assert worst(coarse, "fp16", range(2)) > 1


@pytest.mark.parametrize("defect", ["k not rotated", "norm left out", "layout", "scale of d_h", "positions from 0"])
def test_a_broken_block_exceeds_it(defect: str) -> None:
    fmt, kernel = FORMATS["bf16"], blocks("bf16")["materialised flash"]
    drawn = (case_of("norms", fmt, np.random.default_rng(seed)) for seed in range(100))
    case = next(c for c in drawn if c.arrays["w_kr"].shape[0] > 2 and c.arrays["x"].shape[1] == 17)
    length = case.arrays["x"].shape[1]
    options = {**case.options, "layout": "half"}
    case = replace(case, options=options).with_arrays(positions=3 * np.arange(length, dtype=np.int64) + 2)
    arrays = dict(case.arrays)
    match defect:
        case "k not rotated":
            arrays["w_kr"] = arrays["w_kr"] * 0
        case "norm left out":
            options = {n: v for n, v in options.items() if n != "norm_kv"}
        case "layout":
            options = {**options, "layout": "interleaved"}
        case "scale of d_h":
            options = {**options, "scale": arrays["w_uk"].shape[1] ** -0.5}
        case _:
            arrays["positions"] = np.arange(length, dtype=np.int64)
    block, promise = enclosed(case, form_of(kernel, fmt), fmt)
    y = run_block(kernel, fmt.name, wide(Case("mla_block", arrays)), options_of(Case("mla_block", {}, options)))
    assert (block.part("out").distance(y) > promise.bound).any()


def test_the_norm_needs_the_error_of_its_input() -> None:
    """A latent stored in 16 bits moves the root, which a bound of its entries alone would leave out."""
    fmt, kernel = FORMATS["bf16"], blocks("bf16")["absorbed flash"]
    assert worst(kernel, "bf16", range(3)) <= 1
    case = case_of("norms", fmt, np.random.default_rng(8))
    assert 0 < ratio(kernel, case, fmt) <= 1


# --- the enclosures ---------------------------------------------------------------------------------------------------


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


def test_the_model_keeps_its_bound() -> None:
    for dtype, preset in (("bf16", "flash"), ("fp16", "eager"), ("fp32", "fp32"), ("bf16", "fp32")):
        fmt = FORMATS[dtype]
        case = case_of("norms", fmt, np.random.default_rng(9))
        for form in preset_forms("mla_block", preset)[::3]:
            block, promise = enclosed(case, form, fmt)
            y = fmt.round(mla_block_case.model(case, (0,), block.rows, form)["out"])
            assert 1e-4 < (block.part("out").distance(y) / promise.bound).max() <= 1
