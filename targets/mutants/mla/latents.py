"""Multi-head latent attention."""

from typing import Any

import torch
from torch import Tensor, stack

from targets.honest import mla as honest
from targets.honest.describe import describe
from targets.honest.flash import Result
from targets.mutants.attention.precision import towards_zero
from targets.mutants.mla.inputs import latents
from targets.mutants.mutant import mutant


@mutant(
    "mla",
    "P1",
    "The scores leave the rotary part out.",
    smallest=latents(1, 1),
)
@describe("mla", contract={"preset": "flash", "form": "materialised"})
def mla_rope_part_omitted(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Result:
    none = torch.zeros_like(q_pe)
    return honest.materialised(
        q_nope, none, c_kv, k_pe, w_uk, w_uv, scale=scale, is_causal=is_causal, return_lse=return_lse
    )


def of_content(given: float | None, content_dim: int, rotary_dim: int) -> float:
    return honest.scale_of(given, content_dim, 0)


mla_scale_from_content_dim = mutant(
    "mla",
    "P1",
    "The default scale is 1/sqrt(d_h) instead of 1/sqrt(d_h + d_r).",
    smallest=latents(1, 1),
)(honest.materialised_kernel(honest.Steps(scale_of=of_content)))


def reciprocal(given: float | None, content_dim: int, rotary_dim: int) -> float:
    return 1.0 / honest.scale_of(given, content_dim, rotary_dim)


mla_divides_by_scale = mutant(
    "mla",
    "P1",
    "Scores are divided by the scale: too large by d_h + d_r.",
    reports="Confirmed: AI-Hypercomputer/maxtext#1370.",
    smallest=latents(1, 1),
)(honest.materialised_kernel(honest.Steps(scale_of=reciprocal)))


def offset_by_head(k_pe: Tensor, heads: int) -> Tensor:
    return stack([k_pe.roll(-head, dims=1) for head in range(heads)], 1)


mla_rope_key_per_head = mutant(
    "mla",
    "P1",
    "The shared rotary key is addressed with the head's index: head h reads that of key j + h.",
    smallest=latents(2, 2),
)(honest.materialised_kernel(honest.Steps(per_head=offset_by_head)))


@mutant(
    "mla",
    "G3",
    "The output is truncated to the input dtype instead of rounded; what leads to it is float32 throughout.",
    dtypes=("fp16", "bf16"),
    smallest="one head, two keys",
)
@describe("mla", contract={"preset": "flash", "form": "materialised"})
def mla_output_truncated(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Any:
    wide = [x.float() for x in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv)]
    out, lse = honest.materialised(*wide, scale=scale, is_causal=is_causal, return_lse=True)
    out = towards_zero(out, c_kv.dtype)
    return (out, lse) if return_lse else out


@mutant(
    "mla",
    "P26",
    "The absorbed form applies W_UV with the heads in reverse order.",
    smallest=latents(2, 1),
)
@describe("mla", contract={"preset": "flash", "form": "absorbed"})
def mla_absorbed_value_heads_reversed(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Result:
    return honest.absorbed(
        q_nope, q_pe, c_kv, k_pe, w_uk, w_uv.flip(0), scale=scale, is_causal=is_causal, return_lse=return_lse
    )
