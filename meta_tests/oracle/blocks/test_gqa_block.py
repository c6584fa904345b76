"""gqa_block: a second witness, arithmetics in each other, the bound against honest blocks and broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_gqa_block import BLOCKS, BlockKernel, run_block
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.bounds.blocks import gqa as bounded
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Format
from oracle.ops.blocks.gqa_case import model
from oracle.ops.contracts import declared_forms, preset_forms

Array = NDArray[Any]
FAMILIES = (
    "normal", "one row", "large x", "tiny x", "subnormal", "peaked", "outliers", "constant rows", "cancelling",
    "scaled tables",
)  # fmt: skip


def case_of(family: str, fmt: Format, rng: np.random.Generator) -> Case:
    heads, kv_heads = ((2, 1), (4, 2), (3, 3), (1, 1))[int(rng.integers(4))]
    length, width, dim = int(rng.choice([2, 5, 17, 33])), int(rng.choice([4, 12, 32])), int(rng.choice([2, 8, 16]))
    length = 1 if family == "one row" else length
    x = rng.standard_normal((1, length, width))
    weights = {
        "w_q": rng.standard_normal((heads * dim, width)) / np.sqrt(width),
        "w_k": rng.standard_normal((kv_heads * dim, width)) / np.sqrt(width),
        "w_v": rng.standard_normal((kv_heads * dim, width)) / np.sqrt(width),
        "w_o": rng.standard_normal((7, heads * dim)) / np.sqrt(heads * dim),
    }
    match family:
        case "large x":
            x = x * 30
        case "tiny x":
            x = x * 1e-3
        case "subnormal":
            x = x * fmt.smallest_normal * rng.choice([0.1, 3])
        case "peaked":
            weights["w_q"] = weights["w_q"] * 12
        case "outliers":
            x = x * np.where(rng.random(x.shape) < 0.1, 30, 1)
        case "constant rows":
            x[:] = x[:, :1]
        case "cancelling":
            x[..., 1::2] = x[..., 0::2]
            for name in ("w_q", "w_v"):
                weights[name][:, 1::2] = -weights[name][:, 0::2] * (1 + 2.0**-8)
    angle = np.arange(length)[:, None] * 0.7 ** np.arange(dim // 2)
    # Tables of slower frequencies at far positions, with a magnitude as YaRN's.
    size = 1.0 + (family == "scaled tables") * float(rng.uniform(0.1, 1.0))
    angle = 100 + angle / 40 if family == "scaled tables" else angle
    arrays = {"x": x, **weights, "cos": size * np.cos(angle), "sin": size * np.sin(angle)}
    return Case(
        "gqa_block", {n: fmt.store(a) for n, a in arrays.items()}, {"num_heads": heads, "num_kv_heads": kv_heads}
    )


def wide(case: Case) -> dict[str, Array]:
    arrays = {n: a.astype(np.float64) for n, a in case.arrays.items()}
    return {**arrays, "x": arrays["x"][0]}


def ratio(kernel: BlockKernel, case: Case, fmt: Format, contract: dict[str, Any] | None = None) -> float:
    forms = declared_forms("gqa_block", dict(contract or kernel.contract), fmt.name)
    core = kernel.core
    form = next(
        f
        for f in forms
        if (f.weights.normalised, f.sums.splits > 1, f.sums.row_sum == "rounded", f.sums.lag > 0)
        == (core.normalised, core.splits > 1, core.rounded_sum, core.lag > 0)
    )
    block = enclose(case)[0]
    for precision in (128, 512):
        promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
        coarse = ~(block.part("out").rad <= promise.bound / 1000).all(axis=1)
        if not coarse.any():
            break
        block = refine(case, block, coarse, precision)
    promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
    y = run_block(kernel, fmt, wide(case), case.options["num_heads"], case.options["num_kv_heads"]).astype(np.float64)
    part = block.part("out")
    with np.errstate(all="ignore"):
        certain = np.maximum(part.distance(y) - part.rad, 0.0)
        found = np.where(certain > 0, certain / promise.bound, 0.0)
    found = np.where(np.isfinite(y), found, np.inf)
    return float(np.where(promise.may_overflow & ~np.isfinite(y), 0.0, found).max())


def worst(kernel: BlockKernel, seeds: range, contract: dict[str, Any] | None = None) -> float:
    most = 0.0
    for name in kernel.formats:
        for place, family in enumerate(FAMILIES):
            for seed in seeds:
                case = case_of(family, FORMATS[name], np.random.default_rng([seed, place]))
                most = max(most, ratio(kernel, case, FORMATS[name], contract))
    return most


@pytest.mark.parametrize("name", BLOCKS)
def test_no_honest_block_exceeds_its_bound(name: str) -> None:
    most = worst(BLOCKS[name], range(1))
    assert 0.05 < most <= 1, most


@pytest.mark.deep
@pytest.mark.parametrize("name", BLOCKS)
def test_no_honest_block_exceeds_its_bound_at_length(name: str) -> None:
    most = worst(BLOCKS[name], range(1, 25))
    assert most <= 1, most


def test_broken_promises_exceed_it() -> None:
    stored, kept = BLOCKS["flash"], BLOCKS["fp32"]
    sixteen = replace(stored, formats=("bf16", "fp16"))
    # What passes between calls stored in 16 bits, where everything is said to stay in float32.
    assert worst(sixteen, range(2), {"preset": "fp32"}) > 1
    assert worst(sixteen, range(2), {"preset": "flash", "between": None, "rotate": None}) > 1
    assert worst(BLOCKS["tf32"], range(1), {"preset": "fp32"}) > 1
    assert worst(kept, range(1)) <= 1


@pytest.mark.parametrize("defect", ["cos and sin exchanged", "kv heads tiled", "rotation backwards", "w_o transposed"])
def test_a_broken_block_exceeds_it(defect: str) -> None:
    fmt = FORMATS["bf16"]
    case = replace(case_of("normal", fmt, np.random.default_rng(5)), options={"num_heads": 4, "num_kv_heads": 2})
    rng = np.random.default_rng(6)
    shapes = {"x": (1, 9, 12), "w_q": (32, 12), "w_k": (16, 12), "w_v": (16, 12), "w_o": (32, 32)}
    arrays = {n: fmt.store(rng.standard_normal(s) / (1 if n == "x" else np.sqrt(s[-1]))) for n, s in shapes.items()}
    angle = np.arange(9)[:, None] * 0.7 ** np.arange(4)
    case = case.with_arrays(**arrays, cos=fmt.store(np.cos(angle)), sin=fmt.store(np.sin(angle)))
    assert ratio(BLOCKS["flash"], case, fmt) <= 1
    match defect:
        case "cos and sin exchanged":
            broken = case.with_arrays(cos=case.arrays["sin"], sin=case.arrays["cos"])
        case "kv heads tiled":
            order = np.concatenate([np.arange(8), np.arange(16, 24), np.arange(8, 16), np.arange(24, 32)])
            broken = case.with_arrays(w_q=case.arrays["w_q"][order], w_o=case.arrays["w_o"][:, order])
        case "rotation backwards":
            broken = case.with_arrays(sin=-case.arrays["sin"])
        case _:
            broken = case.with_arrays(w_o=np.ascontiguousarray(case.arrays["w_o"].T))
    block = refine(case, enclose(case)[0], np.ones(9, dtype=bool), 128)
    promise = bounded.bounds(case, block, (preset_forms("gqa_block", "flash")[0],), {"out": fmt})[0]["out"]
    y = run_block(BLOCKS["flash"], fmt, wide(broken), 4, 2).astype(np.float64)
    assert (block.part("out").distance(y) > promise.bound).any()


# --- the enclosures ---------------------------------------------------------------------------------------------------


def witness(case: Case) -> list[list[Any]]:
    """y in plain mpmath loops, one sequence."""
    a = {n: [[mpmath.mpf(float(v)) for v in row] for row in x] for n, x in wide(case).items()}
    heads, kv_heads = case.options["num_heads"], case.options["num_kv_heads"]
    dim = len(a["w_q"]) // heads

    def linear(row: list[Any], weight: list[list[Any]]) -> list[Any]:
        return [mpmath.fsum(u * v for u, v in zip(row, w, strict=True)) for w in weight]

    def turned(row: list[Any], at: int) -> list[Any]:
        out = list(row)
        for i in range(dim // 2):
            c, s, j = a["cos"][at][i], a["sin"][at][i], i + dim // 2
            out[i], out[j] = row[i] * c - row[j] * s, row[i] * s + row[j] * c
        return out

    q, k, v = ([linear(row, a[n]) for row in a["x"]] for n in ("w_q", "w_k", "w_v"))
    result = []
    for i in range(len(a["x"])):
        joined: list[Any] = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            query = turned(q[i][h * dim : (h + 1) * dim], i)
            weights = []
            for j in range(i + 1):
                key = turned(k[j][g * dim : (g + 1) * dim], j)
                weights.append(
                    mpmath.exp(mpmath.fsum(u * w for u, w in zip(query, key, strict=True)) / mpmath.sqrt(dim))
                )
            total = mpmath.fsum(weights)
            for c in range(g * dim, (g + 1) * dim):
                joined.append(mpmath.fsum(w * v[j][c] for j, w in enumerate(weights)) / total)
        result.append(linear(joined, a["w_o"]))
    return result


@pytest.mark.parametrize("family", ["normal", "outliers", "cancelling"])
def test_enclosures_hold_the_second_witness_and_each_other(family: str) -> None:
    case = case_of(family, FORMATS["bf16"], np.random.default_rng([3, len(family)]))
    blocks = [enclose(case, ar=ar)[0].part("out") for ar in (BallArithmetic(), arb_arithmetic(160), mp_arithmetic(300))]
    with mpmath.workprec(300):
        exact = witness(case)
        for part in blocks:
            for i, row in enumerate(exact):
                for j, value in enumerate(row):
                    middle = mpmath.mpf(float(part.hi[i, j])) + mpmath.mpf(float(part.lo[i, j]))
                    assert abs(middle - value) <= part.rad[i, j] + abs(value) * mpmath.mpf(2) ** -100
    ball, fine, _ = blocks
    assert (np.abs((ball.hi - fine.hi) + (ball.lo - fine.lo)) <= ball.rad + fine.rad).all()


def test_some_rows_alone_are_those_of_the_whole() -> None:
    case = case_of("normal", FORMATS["fp16"], np.random.default_rng(11))
    length = case.arrays["x"].shape[1]
    rows = np.array([0, length - 1])
    whole, some = enclose(case)[0].part("out"), enclose(case, rows=rows)[0].part("out")
    assert (np.abs(whole.hi[rows] - some.hi) <= whole.rad[rows] + some.rad).all()
    refined = refine(case, enclose(case)[0], np.arange(length) == length - 1, 256)
    assert refined.part("out").rad[-1].max() < 1e-20
    assert refined.part("0.scores").rad[-1].max() < 1e-20


def test_what_a_row_does_not_read_does_not_spoil_it() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(2))
    length = case.arrays["x"].shape[1]
    assert length > 3
    for name, spoiled in (("x", 3), ("cos", 3)):
        array = case.arrays[name].copy()
        array[..., 3, 0] = np.nan
        block = enclose(case.with_arrays(**{name: array}))[0]
        assert block.undefined.tolist() == [i >= spoiled for i in range(length)]
    weight = case.arrays["w_v"].copy()
    weight[0, 0] = np.inf
    assert enclose(case.with_arrays(w_v=weight))[0].undefined.all()


def test_wrong_cases_are_named() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(2))
    for options, message in (
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"num_kv_heads": True}, "num_kv_heads must be a positive integer, got True"),
        ({"num_heads": 3, "num_kv_heads": 2}, "no multiple of num_kv_heads = 2"),
        ({"num_heads": 7, "num_kv_heads": 7}, "no multiple of num_heads = 7"),
        ({"causal": True}, "unknown option 'causal'"),
    ):
        with pytest.raises(ValueError, match=message):
            enclose(case.with_options(**options))
    for name in case.arrays:
        with pytest.raises(ValueError, match="must have"):
            enclose(case.with_arrays(**{name: case.arrays[name][..., None]}))
    with pytest.raises(ValueError, match="w_o must have shape"):
        enclose(case.with_arrays(w_o=case.arrays["w_o"][:, :-1]))


def test_the_model_keeps_its_bound() -> None:
    for dtype, preset in (("bf16", "flash"), ("fp16", "eager"), ("fp32", "fp32"), ("bf16", "fp32")):
        fmt = FORMATS[dtype]
        case = case_of("normal", fmt, np.random.default_rng(9))
        block = refine(case, enclose(case)[0], np.ones(case.arrays["x"].shape[1], dtype=bool), 160)
        form = preset_forms("gqa_block", preset)[0]
        promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
        y = fmt.round(model(case, (0,), block.rows, form)["out"])
        found = block.part("out").distance(y) / promise.bound
        assert 1e-3 < found.max() <= 1
