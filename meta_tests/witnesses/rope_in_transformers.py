"""The rotary embedding of transformers against the oracle: an independent implementation of every rule.

Run by ``tox -e witness``, which installs transformers; the file's name keeps it out of the ordinary tests, so that
none of them is skipped where transformers is missing. Configurations are made here: nothing is downloaded.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from meta_tests.kernels.honest_rope_scaling import draw_parameters
from meta_tests.oracle.rope.test_bounds import enclosed, form_of, worst_ratio
from oracle.arithmetic.arb import arb_arithmetic
from oracle.bounds.rope.frequency import frequency_error, magnitude_of
from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.rope import formula as rope
from oracle.ops.rope import scaling as rope_scaling
from oracle.ops.rope.parameters import read_scaling
from properties.ops.rope.scalings import RELEASED, longrope

KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
FP32 = FORMATS["fp32"]
# Keys of the option that transformers takes elsewhere, or does not have.
OWN = ("max_position_embeddings", "ramp", "seq_len", "mscale_rule")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(parameters: dict[str, Any], base: float, d: int, *, head_dim: int | None = None) -> LlamaConfig:
    """A configuration with these parameters; no model is made of it."""
    known = {key: value for key, value in parameters.items() if key not in OWN} | {"rope_theta": base}
    if head_dim is not None:
        known["partial_rotary_factor"] = d / head_dim
    longest = parameters.get("max_position_embeddings", parameters.get("original_max_position_embeddings", 2048))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaConfig(
            hidden_size=2 * (head_dim or d), num_attention_heads=2, head_dim=head_dim or d,
            max_position_embeddings=longest, rope_parameters=known,
        )  # fmt: skip


def frequencies(parameters: dict[str, Any], base: float, d: int, length: int, **more: Any) -> tuple[Any, float]:
    made, size = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config_of(parameters, base, d, **more), device="cpu", seq_len=length
    )
    return made.double().numpy(), float(size)


def compare(parameters: dict[str, Any], base: float, d: int, length: int, **more: Any) -> float:
    """Error of transformers' frequencies over the bound of float32 ones; its magnitude must be right to float64."""
    scaling = read_scaling(parameters, base=base, dim=d, rotary_dim=d)
    exact = arb_arithmetic(160)
    with exact.working():
        hi, lo, _ = exact.to_enclosure(rope.frequencies(exact, base, d, scaling=scaling, length=length))
        size = rope_scaling.magnitude(exact, scaling)
        expected = 1.0 if size is None else float(exact.to_enclosure(size)[0][0, 0])
    made, found = frequencies(parameters, base, d, length, **more)
    assert found == pytest.approx(expected, rel=1e-14)
    bound = frequency_error(base, d, scaling, length, FP32)
    gap = np.abs((made - hi) - lo) / hi
    # The first pair of most rules is exact, and so must be the one found.
    with np.errstate(invalid="ignore"):
        return float(np.where(gap == 0, 0.0, gap / bound).max())


@pytest.mark.parametrize("known", [k for k in RELEASED if k.scaling["rope_type"] != "default"], ids=lambda k: k.name)
def test_released_configurations(known: Any) -> None:
    assert compare(known.scaling, known.base, known.dims, 10) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_parameters(kind: str) -> None:
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(150):
        d, base = int(rng.choice([4, 20, 64, 128])), float(rng.choice([1e4, 5e5, 12345.0, 1000.0]))
        parameters = draw_parameters(rng, kind, d)
        parameters.pop("ramp", None)
        if parameters["factor"] < 1:
            continue
        length = int(rng.choice([1, 64, 2049, 100_000]))
        worst = max(worst, compare(parameters, base, d, length))
    assert 0 < worst <= 1


def test_the_trained_length_itself_is_short() -> None:
    parameters = longrope(16, 64)
    for length in (63, 64, 65, 66):
        assert compare(parameters, 10000.0, 32, length) <= 1
    both = [frequencies(parameters, 10000.0, 32, length)[0] for length in (64, 65)]
    assert not np.allclose(*both)


def test_mscale_counts_only_in_pairs() -> None:
    """The rule called ``transformers``; DeepSeek's own differs where one of the two is left out."""
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
    for more in ({"mscale": 0.707}, {"mscale_all_dim": 0.5}, {"mscale": 0.707, "mscale_all_dim": 0.5}):
        assert compare({**yarn, **more}, 10000.0, 64, 1) <= 1
        scaling = read_scaling({**yarn, **more, "mscale_rule": "deepseek"}, base=1e4, dim=64, rotary_dim=64)
        same = magnitude_of(scaling, 0.0)[0] == pytest.approx(frequencies({**yarn, **more}, 1e4, 64, 1)[1], rel=1e-12)
        assert same == (len(more) == 2)
    assert frequencies({**yarn, "attention_factor": 1.25, "mscale": 2.0}, 1e4, 64, 1)[1] == 1.25


def test_the_ramp_of_the_paper_is_another_one() -> None:
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
    made = frequencies(yarn, 10000.0, 64, 1)[0]
    scaling = read_scaling({**yarn, "ramp": "rotations"}, base=1e4, dim=64, rotary_dim=64)
    exact = arb_arithmetic(120)
    with exact.working():
        paper = exact.to_enclosure(rope.frequencies(exact, 1e4, 64, scaling=scaling))[0][0]
    assert float(np.abs(made / paper - 1).max()) > 0.05


def test_partial_rotation_scales_the_rotated_width() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert compare(yarn, 10000.0, 32, 1, head_dim=128) <= 1


# Whole rotations: table and rotation of the model code, in the contract that it keeps.


def rotated(parameters: dict[str, Any], base: float, x: Any, positions: Any, *, interleaved: bool = False) -> Any:
    """x [B, H, S, D] turned by Llama's modules, or by DeepSeek-V3's interleaved function."""
    module = LlamaRotaryEmbedding(config_of(parameters, base, x.shape[-1]))
    cos, sin = module(x, positions if positions.ndim == 2 else positions[None])
    turn = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    return turn(x, x, cos, sin)[0]


def case_of(x: Any, positions: Any, base: float, parameters: dict[str, Any] | None, dtype: str, **more: Any) -> Case:
    held = FORMATS[dtype].store(x.detach().double().numpy())
    turned = "dy" if more.get("op") == "rope_backward" else "x"
    options = {"base": base, "scaling": parameters, "layout": more.get("layout", "half")}
    return Case(more.get("op", "rope"), {turned: held, "positions": positions.numpy()}, options)


def ratio(observed: Any, case: Case, dtype: str, key: tuple[int, int]) -> float:
    # Tables follow the activations' dtype, and so does the rotation, call by call.
    form = form_of("fp32_angle") if dtype == "fp32" else form_of("input_all", "fp32 angle")
    held = FORMATS[dtype].store(observed.detach().double().numpy())
    return worst_ratio(held[key], case, enclosed(case, key=key), form, FORMATS[dtype])


CASES = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048},
    "yarn, mscale": RELEASED[2].scaling,
    "llama3": RELEASED[0].scaling,
    "longrope": longrope(32, 64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rotations_are_within_the_bound(name: str, dtype: str) -> None:
    """Forward and, by autograd, backward, at positions within and beyond the trained length."""
    parameters, generator = CASES[name], torch.Generator().manual_seed(1)
    for far in (40, 64, 700):
        positions = torch.tensor([[0, 1, far // 2, far - 1], [3, 5, 7, far // 3]])
        x = torch.randn(2, 2, 4, 64, generator=generator).to(DTYPES[dtype]).requires_grad_()
        y = rotated(parameters, 10000.0, x, positions)
        dy = torch.randn(y.shape, generator=generator).to(y.dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        for key in ((0, 1), (1, 0)):
            assert ratio(y, case_of(x, positions, 1e4, parameters, dtype), dtype, key) <= 1
            backward = case_of(dy, positions, 1e4, parameters, dtype, op="rope_backward")
            assert ratio(dx, backward, dtype, key) <= 1


def test_interleaved_pairs() -> None:
    x = torch.randn(1, 2, 5, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([0, 1, 17, 300, 4000])
    y = rotated(CASES["yarn, mscale"], 10000.0, x, positions, interleaved=True)
    # DeepSeek's function leaves the turned pairs side by side.
    back = torch.stack((y[..., :32], y[..., 32:]), -1).flatten(-2)
    case = case_of(x, positions, 1e4, CASES["yarn, mscale"], "fp32", layout="interleaved")
    found = min(ratio(made, case, "fp32", (0, 1)) for made in (y, back))
    assert found <= 1


@pytest.mark.parametrize(
    ("module", "sections", "interleaved"),
    [(Qwen2VLRotaryEmbedding, [12, 10, 10], False), (Qwen3VLTextRotaryEmbedding, [12, 10, 10], True)],
    ids=["Qwen2-VL", "Qwen3-VL"],
)
def test_sections(module: Any, sections: list[int], interleaved: bool) -> None:
    config = config_of({"rope_type": "default"}, 1000000.0, 64)
    config.rope_parameters["mrope_section"] = sections
    x = torch.randn(2, 1, 4, 64, generator=torch.Generator().manual_seed(3))
    positions = torch.randint(0, 900, (3, 2, 4), generator=torch.Generator().manual_seed(4))
    cos, sin = module(config)(x, positions)
    y = apply_rotary_pos_emb(x, x, cos, sin)[0]
    parameters: dict[str, Any] = {"rope_type": "default", "mrope_section": sections}
    if interleaved:
        parameters["mrope_interleaved"] = True
    for key in ((0, 0), (1, 0)):
        assert ratio(y, case_of(x, positions, 1e6, parameters, "fp32"), "fp32", key) <= 1
        other = {**parameters, "mrope_interleaved": not interleaved}
        assert ratio(y, case_of(x, positions, 1e6, other, "fp32"), "fp32", key) > 1


def test_dynamic_modules_remember_longer_calls() -> None:
    """State that is no part of the formula: between the trained and a longer length the longer one counts on."""
    module = LlamaRotaryEmbedding(config_of(CASES["dynamic"], 10000.0, 64))
    x = torch.ones(1, 1, 2, 64)
    fresh = module(x, torch.tensor([[0, 100]]))[0]
    module(x, torch.tensor([[0, 1000]]))
    assert not torch.equal(module(x, torch.tensor([[0, 100]]))[0], fresh)
    plain = math.cos(30.0)
    assert module(x, torch.tensor([[0, 30]]))[0][0, 1, 0].item() == pytest.approx(plain, abs=1e-5)
