"""The scale of the scores, and what it must not touch."""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import ONE, one_head, visible
from targets.mutants.mutant import mutant

scale_ignored = mutant(
    "attention",
    "P17",
    "`scale` is accepted and 1/sqrt(D) is used.",
    reports="Confirmed: pytorch/pytorch#174361, ROCm/composable_kernel#526.",
    smallest=one_head([[1.0] * 4], [[1.0] * 4], ONE, scale=2.0),
)(kernel(Steps(scale_of=lambda given, head_dim: flash.scale_of(None, head_dim))))


scale_one_by_default = mutant(
    "attention",
    "P1",
    "Without a given scale, 1 is used instead of 1/sqrt(D).",
    reports="Confirmed: mlc-ai/mlc-llm#3426.",
    smallest=one_head([[1.0] * 4], [[1.0] * 4], ONE, scale=None),
)(kernel(Steps(scale_of=lambda given, head_dim: 1.0 if given is None else given)))


def from_padded(given: float | None, head_dim: int) -> float:
    return flash.scale_of(given, head_dim + -head_dim % 16)


scale_from_padded_dim = mutant(
    "attention",
    "P18",
    "The default scale is made from the head dimension after padding to a multiple of 16.",
    reports="Confirmed: intel/ipex-llm#12619.",
    smallest=one_head(ONE, ONE, ONE, scale=None),
)(kernel(Steps(scale_of=from_padded)))


@mutant(
    "attention",
    "P17",
    "The path that takes a mask scales the query, and then the scores again.",
    smallest=one_head([[1.0] * 4], [[1.0] * 4], ONE, scale=None, attn_mask=visible(True)),
)
def scale_twice_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    once = flash.scale_of(scale, q.shape[-1])
    used = once if attn_mask is None else once * once
    return flash.attention(q, k, v, scale=used, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def scaled_bias(tile: Tensor, bias: Tensor, alpha: float) -> Tensor:
    return flash.add_bias(tile, bias.to(tile.dtype) * alpha, alpha)


bias_scaled = mutant(
    "attention",
    "P17",
    "The scale is folded over the whole exponent, so that an additive mask is scaled too.",
    reports="Reported: tenstorrent/tt-metal#55337.",
    smallest=one_head([[0.0] * 4], [[0.0] * 4] * 2, [[0.0], [1.0]], scale=None, attn_mask=torch.tensor([[0.0, 3.0]])),
)(kernel(Steps(add_bias=scaled_bias)))
