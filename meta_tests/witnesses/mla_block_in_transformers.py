"""DeepSeek-V3's attention module of transformers against the oracle of mla_block: YaRN in its tables and in its scale.

Run by ``tox -e witness``. Weights are drawn and small: nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from oracle.bounds.blocks import mla as bounded
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.blocks import mla_case as mla_block_case
from oracle.ops.contracts import declared_forms

HEADS, D_H, D_V, D_C, D_R, D_Q, WIDTH = 3, 16, 16, 32, 16, 24, 40
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "DeepSeek-V3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "DeepSeek-V2-Lite": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "two magnitudes": {**YARN, "mscale": 0.5, "mscale_all_dim": 2.0},
    "in the scale alone": {**YARN, "mscale_all_dim": 1.0},
    "in the tables alone": {**YARN, "mscale": 1.0},
    "stated": {**YARN, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def modules(parameters: dict[str, Any]) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=D_Q, kv_lora_rank=D_C,
        qk_nope_head_dim=D_H, qk_rope_head_dim=D_R, v_head_dim=D_V, rope_interleave=True, max_position_embeddings=2560,
        attention_bias=False, attn_implementation="eager",
        rope_parameters={**parameters, "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    made = DeepseekV3Attention(config, 0).eval()
    with torch.no_grad():
        for weight in made.parameters():
            fan_in = weight.shape[-1] if weight.ndim == 2 else 100
            weight.copy_(torch.randn(weight.shape) * 1.5 / fan_in**0.5 + (weight.ndim == 1))
    return made, DeepseekV3RotaryEmbedding(config)


def case_of(made: DeepseekV3Attention, x: Any, positions: Any, parameters: dict[str, Any]) -> Case:
    held = {name: w.detach().numpy() for name, w in made.named_parameters()}
    down, up = held["kv_a_proj_with_mqa.weight"], held["kv_b_proj.weight"].reshape(HEADS, D_H + D_V, D_C)
    query = held["q_b_proj.weight"].reshape(HEADS, D_H + D_R, D_Q)
    arrays = {
        "x": x.numpy(), "positions": positions.numpy(), "w_dkv": down[:D_C], "w_kr": down[D_C:], "w_uk": up[:, :D_H],
        "w_uv": up[:, D_H:], "w_dq": held["q_a_proj.weight"], "w_uq": query[:, :D_H], "w_qr": query[:, D_H:],
        "w_o": held["o_proj.weight"],
    }  # fmt: skip
    gains = {"norm_kv": held["kv_a_layernorm.weight"], "norm_q": held["q_a_layernorm.weight"]}
    return Case("mla_block", arrays, {**gains, "eps": 1e-6, "layout": "interleaved", "scaling": parameters})


def worst(y: Any, case: Case) -> float:
    block, fmt = enclose(case)[0], FORMATS["fp32"]
    form = declared_forms("mla_block", {"preset": "fp32", "form": "materialised"}, "fp32")[0]
    promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
    return float((block.part("out").distance(y.numpy().astype(np.float64)) / promise.bound).max())


@pytest.mark.parametrize("name", SCALINGS)
def test_deepseeks_attention_is_within_the_bound(name: str) -> None:
    parameters = SCALINGS[name]
    made, rotary = modules(parameters)
    x = torch.randn(1, 12, WIDTH)
    positions = 3 * torch.arange(12) + 200
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        y = made(x, rotary(x, positions[None]), mask)[0][0]
    case = case_of(made, x, positions, parameters)
    assert mla_block_case.scale_float(case) == pytest.approx(made.scaling, rel=1e-14)
    assert 0 < worst(y, case) <= 1
    # The same module is far outside for a block of other parameters.
    for other in set(SCALINGS) - {name}:
        assert worst(y, case.with_options(scaling=SCALINGS[other])) > 1, other
