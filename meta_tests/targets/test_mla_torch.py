"""targets.builtin.mla_torch: both forms keep the contracts that they declare, and nothing stricter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block
from oracle.bounds.mla import output as bounds_mla
from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms
from oracle.ops.mla import case as mla_case
from targets.builtin import mla_torch

TARGETS = (mla_torch.mla_materialised, mla_torch.mla_absorbed)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = ((3, 3, 4, 2, 3, 2), (5, 40, 16, 8, 24, 12), (2, 33, 128, 64, 512, 128), (7, 4, 4, 2, 8, 3))


def draw(fmt: str, shape: tuple[int, ...], *, size: float = 1.0, causal: bool = False, seed: int = 0) -> Case:
    """Batch 2, two heads; ``shape`` is (Sq, Sk, d_h, d_r, d_c, d_v), c_kv and k_pe multiplied by ``size``."""
    rng, (sq, sk, d_h, d_r, d_c, d_v) = np.random.default_rng(seed), shape
    values = {
        "q_nope": rng.standard_normal((2, 2, sq, d_h)),
        "q_pe": rng.standard_normal((2, 2, sq, d_r)),
        "c_kv": rng.standard_normal((2, sk, d_c)) * size,
        "k_pe": rng.standard_normal((2, sk, d_r)) * size,
        "w_uk": rng.standard_normal((2, d_h, d_c)) / np.sqrt(d_c),
        "w_uv": rng.standard_normal((2, d_v, d_c)) / np.sqrt(d_c),
    }
    options = {"is_causal": causal, "causal_alignment": "bottom_right"}
    return Case("mla", {name: FORMATS[fmt].store(a) for name, a in values.items()}, options)


def call(function: Callable[..., Any], case: Case, fmt: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [torch.from_numpy(case.arrays[n].astype(np.float64)).to(DTYPES[fmt]) for n in mla_case.INPUTS]
    result: tuple[torch.Tensor, torch.Tensor] = function(*tensors, return_lse=True, **options)
    return result


def enclosed(case: Case, key: tuple[int, ...]) -> Block:
    ar = BallArithmetic()
    with ar.working():
        return mla_case.evaluate(ar, case, key, np.arange(case.arrays["q_nope"].shape[2]))


def worst(function: Callable[..., Any], case: Case, fmt: str, contract: Any, **options: Any) -> dict[str, float]:
    """Largest error/bound per output over all heads, of rows that are not empty."""
    out, lse = call(function, case, fmt, is_causal=case.options["is_causal"], **options)
    form = declared_forms("mla", contract, fmt)[0]
    found = {"out": 0.0, "lse": 0.0}
    for key in mla_case.blocks(case):
        block = enclosed(case, key)
        (bounded,) = bounds_mla.bounds(case, block, [form], {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})
        for name, y in (("out", out[key].double().numpy()), ("lse", lse[key].double().numpy()[:, None])):
            some = ~block.empty
            assert not bounded[name].may_overflow[some].any()
            ratio = (block.part(name).distance(y) / bounded[name].bound)[some]
            found[name] = max(found[name], float(np.where(np.isnan(ratio), np.inf, ratio).max()))
    return found


@pytest.mark.parametrize("function", TARGETS)
@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_declared_contract_is_kept(function: Any, fmt: str, causal: bool) -> None:
    declared = function.__attn_oracle__["contract"]
    highest = 0.0
    for shape in SHAPES:
        found = worst(function, draw(fmt, shape, causal=causal), fmt, declared)
        assert max(found.values()) <= 1, (shape, found)
        highest = max(highest, *found.values())
    assert highest > 0.01
    assert max(worst(function, draw(fmt, SHAPES[1]), fmt, declared, scale=0.7).values()) > 1, "a wrong scale must show"


@pytest.mark.parametrize("function", TARGETS)
@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_stored_stages_break_a_contract_that_keeps_them_wide(function: Any, fmt: str) -> None:
    declared = {**function.__attn_oracle__["contract"], "preset": "flash", "up": None, "latent": None}
    assert worst(function, draw(fmt, SHAPES[1], size=3.0), fmt, declared)["lse"] > 1


@pytest.mark.parametrize("function", TARGETS)
def test_subnormal_inputs_are_read(function: Any) -> None:
    """Large enough for a bfloat16 matrix engine that reads them as zero, were it used."""
    case = draw("bf16", (64, 64, 64, 16, 64, 64), size=2.0**-130)
    out, _ = call(function, case, "bf16")
    assert (out != 0).double().mean() > 0.5
    assert max(worst(function, case, "bf16", function.__attn_oracle__["contract"]).values()) <= 1


def test_the_two_targets_agree_within_the_sum_of_their_bounds() -> None:
    case = draw("bf16", SHAPES[1])
    forms = [declared_forms("mla", f.__attn_oracle__["contract"], "bf16")[0] for f in TARGETS]
    assert [f.latent.form for f in forms] == ["materialised", "absorbed"]
    (one, _), (other, _) = (call(f, case, "bf16") for f in TARGETS)
    assert not torch.equal(one, other)
    for key in mla_case.blocks(case):
        allowed = bounds_mla.agreement(case, enclosed(case, key), *forms, {"out": FORMATS["bf16"]})["out"].bound
        assert ((one[key] - other[key]).abs().double().numpy() <= allowed).all()
        mixed = call(TARGETS[1], case.with_arrays(w_uv=case.arrays["w_uv"][::-1].copy()), "bf16")[0]
        assert ((one[key] - mixed[key]).abs().double().numpy() > allowed).any()


@pytest.mark.parametrize("function", TARGETS)
def test_outputs_have_the_stated_shapes_dtypes_and_conventions(function: Any) -> None:
    case = draw("bf16", (7, 4, 4, 2, 8, 3))
    out, lse = call(function, case, "bf16", is_causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 2, 7, 3), (2, 2, 7))
    # Bottom right: the first three of seven queries see none of four keys.
    assert (out[:, :, :3] == 0).all()
    assert torch.isneginf(lse[:, :, :3]).all()
    assert torch.isfinite(lse[:, :, 3:]).all()
    tensors = [torch.from_numpy(case.arrays[n].astype(np.float64)).bfloat16() for n in mla_case.INPUTS]
    assert isinstance(function(*tensors), torch.Tensor)
