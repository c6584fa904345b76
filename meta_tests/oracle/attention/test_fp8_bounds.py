"""Eight bits: stored inputs with factors, P in e4m3 or e5m2, a truncating matrix engine; bounds against honest kernels
and against defects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.honest_fp8 import Fp8Kernel, run_fp8
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block
from oracle.bounds.attention import output as attention_bounds
from oracle.bounds.bounded import Bounded
from oracle.case import Case, load_case, save_case
from oracle.contract.constants import accumulation_error, constants
from oracle.contract.contract import UnknownContract
from oracle.evaluate import enclose, refine
from oracle.formats import E4M3, E5M2, FORMATS, FP32, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.attention.options import DESCALES
from oracle.ops.contracts import declared_forms

CONTRACT: dict[str, Any] = {
    "preset": "flash",
    "weights": "e4m3",
    "weight_scale": 256.0,
    "engine": "hopper_fp8",
    "output": "bf16",
}
# name: kernel, what it declares besides, the label of its form
HONEST: dict[str, tuple[Fp8Kernel, dict[str, Any], str]] = {
    "hopper": (Fp8Kernel(), {}, "plain"),
    "hopper, promoted": (Fp8Kernel(promote=True), {"tile": 64}, "plain"),
    "hopper, small tiles": (Fp8Kernel(tile=16), {}, "plain"),
    "float32 chains": (Fp8Kernel(engine=None), {"engine": "fma"}, "plain"),
    "dequantised first": (Fp8Kernel(engine=None, dequantise=True), {"engine": "fma"}, "plain"),
    "P unscaled": (Fp8Kernel(factor=1.0), {"weight_scale": 1.0}, "plain"),
    "P to 448": (Fp8Kernel(factor=448.0), {"weight_scale": 448.0}, "plain"),
    "P in e5m2": (Fp8Kernel(weights="e5m2"), {"weights": "e5m2"}, "plain"),
    "normalised": (Fp8Kernel(normalised=True), {}, "normalised"),
    "normalised, unscaled": (Fp8Kernel(normalised=True, factor=1.0), {"weight_scale": 1.0}, "normalised"),
    "rounded row sum": (Fp8Kernel(rounded_sum=True), {}, "rounded row sum"),
    "e4m3 output": (Fp8Kernel(), {"output": "e4m3"}, "plain"),
    "e4m3 output, saturating": (Fp8Kernel(saturate=True), {"output": "e4m3", "saturate": True}, "plain"),
}
FAMILIES = ("normal", "massive", "constant v", "one hot", "tail mass", "cancelling", "near the largest", "long")


def case_of(name: str, fmt: Format, rng: np.random.Generator) -> Case:
    sq, sk, d, dv = 3, int(rng.choice([1, 5, 40, 130])), int(rng.choice([1, 16, 64])), 5
    if name == "long":
        sk = 700
    q, k, v = rng.standard_normal((sq, d)), rng.standard_normal((sk, d)), rng.standard_normal((sk, dv))
    match name:
        case "massive":
            q, k = q * np.where(rng.random(d) < 0.2, 20, 1), k * np.where(rng.random(d) < 0.2, 20, 1)
        case "constant v":
            v[:] = v[:1]
        case "one hot":
            v[:] = 0
            v[rng.integers(sk)] = 1.0
        case "tail mass":
            q[:, 0], k[:, 0], k[0, 0], v[0] = 8, -rng.uniform(1, 3), 0, 0
        case "cancelling" if d > 1:
            k[:, 1::2], q[:, 1::2] = -k[:, 0::2], q[:, 0::2]
        case "near the largest":
            v = np.sign(v) * fmt.max_finite * (1 - 0.1 * rng.random(v.shape))
    arrays = {n: fmt.store(a, saturate=True)[None, None] for n, a in zip("qkv", (q, k, v), strict=True)}
    factors = {n: float(np.float32(rng.uniform(0.3, 2))) for n in DESCALES}
    return Case("attention", arrays, factors)


def enclosed(case: Case, form: Any, formats: Mapping[str, Format]) -> tuple[Block, dict[str, Bounded]]:
    block = refine(case, enclose(case)[0], np.ones(3, dtype=bool), 256)
    return block, attention_bounds.bounds(case, block, (form,), formats)[0]


def ratio(kernel: Fp8Kernel, contract: dict[str, Any], label: str, case: Case, fmt: Format) -> dict[str, float]:
    output = contract["output"]
    form = next(f for f in declared_forms("attention", contract, fmt.name) if f.label == label)
    block, bounded = enclosed(case, form, {"out": FORMATS[output], "lse": FP32})
    arrays = [case.arrays[n][0, 0].astype(np.float64) for n in "qkv"]
    factors = tuple(case.options[n] for n in DESCALES)
    got = run_fp8(kernel, *arrays, alpha=attention_case.scale_float(case), factors=factors, output=output)
    result = {}
    for name, y in zip(("out", "lse"), got, strict=True):
        part, promise = block.part(name), bounded[name]
        with np.errstate(all="ignore"):
            found = np.maximum(part.distance(y) - part.rad, 0) / promise.bound
        found = np.where(np.isfinite(y), found, np.inf)
        result[name] = float(np.where(promise.may_overflow & ~np.isfinite(y), 0.0, found).max())
    return result


def worst(kernel: Fp8Kernel, contract: dict[str, Any], label: str, seeds: range) -> dict[str, float]:
    most = {"out": 0.0, "lse": 0.0}
    for fmt in (E4M3, E5M2):
        for place, family in enumerate(FAMILIES):
            for seed in seeds:
                case = case_of(family, fmt, np.random.default_rng([seed, place]))
                found = ratio(kernel, contract, label, case, fmt)
                most = {n: max(most[n], found[n]) for n in most}
    return most


@pytest.mark.parametrize("name", HONEST)
def test_no_honest_kernel_exceeds_its_bound(name: str) -> None:
    kernel, more, label = HONEST[name]
    most = worst(kernel, {**CONTRACT, **more}, label, range(2))
    assert max(most.values()) <= 1, most
    assert most["out"] > 0.05, most


@pytest.mark.deep
@pytest.mark.parametrize("name", HONEST)
def test_no_honest_kernel_exceeds_its_bound_at_length(name: str) -> None:
    kernel, more, label = HONEST[name]
    most = worst(kernel, {**CONTRACT, **more}, label, range(2, 60))
    assert max(most.values()) <= 1, most


BROKEN: dict[str, tuple[Fp8Kernel, dict[str, Any], str]] = {
    "P unscaled where 256 is declared": (Fp8Kernel(engine=None, factor=1.0), {"engine": "fma"}, "out"),
    "P in e5m2 where e4m3 is declared": (Fp8Kernel(engine=None, weights="e5m2"), {"engine": "fma"}, "out"),
    "truncated sums where float32 is declared": (Fp8Kernel(), {"engine": "fma"}, "lse"),
    "row sum of the rounded P, undeclared": (Fp8Kernel(engine=None, rounded_sum=True), {"engine": "fma"}, "lse"),
    "P beyond 448": (Fp8Kernel(engine=None, factor=1024.0), {"engine": "fma"}, "out"),
    "P beyond 448, saturated": (Fp8Kernel(engine=None, factor=1024.0, saturate=True), {"engine": "fma"}, "out"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_exceeds_it(name: str) -> None:
    kernel, more, output = BROKEN[name]
    assert worst(kernel, {**CONTRACT, **more}, "plain", range(2))[output] > 1


@pytest.mark.parametrize("factor", DESCALES)
def test_a_forgotten_factor_exceeds_it(factor: str) -> None:
    case = case_of("normal", E4M3, np.random.default_rng(7))
    arrays = {n: np.repeat(a, 2, axis=2) if a.shape[2] == 1 else a for n, a in case.arrays.items()}
    case = replace(case, arrays=arrays)
    forgotten = ratio_without(case, factor)
    assert forgotten > 1


def ratio_without(case: Case, factor: str) -> float:
    form = declared_forms("attention", {**CONTRACT, "engine": "fma"}, "e4m3")[0]
    block, bounded = enclosed(case, form, {"out": FORMATS["bf16"], "lse": FP32})
    arrays = [case.arrays[n][0, 0].astype(np.float64) for n in "qkv"]
    factors = tuple(1.0 if n == factor else case.options[n] for n in DESCALES)
    alpha = attention_case.scale_float(case)
    out, lse = run_fp8(Fp8Kernel(engine=None), *arrays, alpha=alpha, factors=factors, output="bf16")
    name, y = ("out", out) if factor == "v_descale" else ("lse", lse)
    return float((block.part(name).distance(y) / bounded[name].bound).max())


def test_factors_are_those_of_the_definition() -> None:
    """Plain mpmath loops: q_d q . k_d k, then v_d v."""
    case = case_of("normal", E4M3, np.random.default_rng(3))
    q, k, v = (case.arrays[n][0, 0].astype(np.float64).tolist() for n in "qkv")
    fq, fk, fv = (case.options[n] for n in DESCALES)
    block = refine(case, enclose(case)[0], np.ones(3, dtype=bool), 256)
    with mpmath.workprec(300):
        for i, query in enumerate(q):
            exponents = [
                mpmath.fsum(mpmath.mpf(a) * fq * (mpmath.mpf(b) * fk) for a, b in zip(query, key, strict=True))
                / mpmath.sqrt(len(query))
                for key in k
            ]
            weights = [mpmath.exp(s) for s in exponents]
            total = mpmath.fsum(weights)
            for c in range(5):
                value = mpmath.fsum(w * mpmath.mpf(row[c]) * fv for w, row in zip(weights, v, strict=True)) / total
                for name, exact, column in (("out", value, c), ("lse", mpmath.log(total), 0)):
                    part = block.part(name)
                    middle = mpmath.mpf(part.hi[i, column]) + mpmath.mpf(part.lo[i, column])
                    assert abs(middle - exact) <= part.rad[i, column]


def test_factors_of_heads_and_wrong_ones() -> None:
    rng = np.random.default_rng(1)
    q = E4M3.store(rng.standard_normal((2, 4, 3, 8)))
    k, v = (E4M3.store(rng.standard_normal((2, 2, 5, 8))) for _ in range(2))
    factors = np.float32(rng.uniform(0.5, 2, (2, 2)))
    whole = Case("attention", {"q": q, "k": k, "v": v}, {"v_descale": factors})
    bare = whole.without_options("v_descale")
    for a, b in zip(enclose(whole), enclose(bare), strict=True):
        factor = float(factors[a.key[0], a.key[1] // 2])
        assert np.allclose(a.part("out").hi, factor * b.part("out").hi, rtol=1e-12)
    for wrong in (0.0, -1.0, np.inf, 0.1, np.ones(3, np.float32)):
        with pytest.raises(ValueError, match="q_descale"):
            enclose(bare.with_options(q_descale=wrong))


def test_the_weights_of_a_contract_must_fit_their_format() -> None:
    with pytest.raises(UnknownContract, match=r"does not fit into e4m3 \(at most 448\)"):
        declared_forms("attention", {**CONTRACT, "weight_scale": 512.0}, "bf16")
    with pytest.raises(UnknownContract, match=r"weight_scale is 0\.0; valid: a finite number above 0"):
        declared_forms("attention", {**CONTRACT, "weight_scale": 0.0}, "bf16")
    assert all(f.weights.scale * np.exp(f.sums.lag) <= 448 for f in declared_forms("attention", CONTRACT, "bf16"))


def test_promotion_bounds_long_sums_that_an_accumulator_of_the_engine_does_not() -> None:
    c = constants(declared_forms("attention", CONTRACT, "e4m3")[0], E4M3)
    running = declared_forms("attention", CONTRACT, "e4m3")[0]
    promoted = declared_forms("attention", {**CONTRACT, "tile": 128}, "e4m3")[0]
    assert accumulation_error(running, c, 4096) > 0.5
    assert accumulation_error(promoted, c, 4096) == pytest.approx(accumulation_error(promoted, c, 128), rel=1e-2)
    assert accumulation_error(promoted, c, 128) < 0.02


def test_the_model_kernel_rounds_scaled_weights() -> None:
    form = declared_forms("attention", CONTRACT, "bf16")[0]
    stages = attention_case.stages(form, FORMATS["bf16"])
    x = np.concatenate([np.linspace(0, 1, 2001), 2.0 ** -np.linspace(0, 24, 999)]).astype(np.float32)[None]
    ar = RoundedArithmetic(FP32, stages)
    assert np.array_equal(ar.round(x, "weights"), E4M3.round(x.astype(np.float64) * 256) / 256)


def test_a_case_in_eight_bits_survives_its_file(tmp_path: Any) -> None:
    every = np.arange(256).astype(np.uint8)
    arrays = {n: every.view(f.dtype).reshape(1, 1, 16, 16) for n, f in (("q", E4M3), ("k", E5M2), ("v", E4M3))}
    case = Case("attention", arrays, {"q_descale": 0.5})
    back = load_case(save_case(case, tmp_path / "case")[0])
    assert back.digest() == case.digest()
    assert {n: a.dtype for n, a in back.arrays.items()} == {n: a.dtype for n, a in arrays.items()}


def test_every_pattern_crosses_to_torch_and_back() -> None:
    import torch

    from targets.calling.frameworks import bridge

    torch_bridge = bridge("torch")
    for fmt, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        stored = np.arange(256).astype(np.uint8).view(fmt.dtype)
        native = torch_bridge.to_native(stored, "cpu")
        assert native.dtype is dtype
        assert np.array_equal(torch_bridge.to_numpy(native).view(np.uint8), stored.view(np.uint8))
        wide = native.float().numpy()
        with np.errstate(invalid="ignore"):
            assert np.array_equal(wide, stored.astype(np.float32), equal_nan=True)
