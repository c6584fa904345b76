"""Scores, weights and sums that leave what a format or a shortcut can hold."""

import math

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Part, Steps, kernel, normalise
from targets.honest.flash_variants import LAG, fused, fused_rescale, lazy_row_max
from targets.mutants.attention.inputs import ONE, ZERO, one_head
from targets.mutants.mutant import mutant

finite_max_sentinel = mutant(
    "attention",
    "P9",
    "The running maximum starts at a finite -50000: rows whose scores all lie below it look like empty ones.",
    reports="Reported: flashinfer-ai/flashinfer#4450.",
    smallest=one_head([[-256.0]], [[300.0]], ONE),
)(kernel(Steps(first_max=-50000.0)))


def max_of_tile(old: Tensor, tile: Tensor) -> Tensor:
    top = tile.amax(-1, keepdim=True)
    return torch.where(top == -math.inf, old, top)


max_of_current_tile = mutant(
    "attention",
    "P9",
    "The maximum of the current tile replaces the running one: exact on paper, but rescaling can overflow.",
    reports="Confirmed: tile-ai/tilelang#1148.",
    smallest=one_head(ONE, [[3.0]] * 32 + [[-100.0]], [[1.0]] * 32 + [[2.0]]),
)(kernel(Steps(row_max=max_of_tile)))


def fp16_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(q, k, 1.0).half().float() * alpha


scores_in_fp16 = mutant(
    "attention",
    "P9",
    "q k^T is stored in fp16 before the scale is applied, and overflows.",
    reports="Confirmed: ultralytics/ultralytics#24990, PaddlePaddle/Paddle#41933.",
    dtypes=("fp16",),
    smallest=one_head([[40.0] * 64], [[40.0] * 64], ONE, scale=None),
)(kernel(Steps(scores=fp16_scores)))


def bf16_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(q, k, alpha).bfloat16().float()


scores_in_bf16 = mutant(
    "attention",
    "P9",
    "Scaled scores are stored in bf16: two large scores that differ by 1 become equal.",
    reports="Reported, in the form of wrong outputs on activations with large keys: tenstorrent/tt-metal#21199.",
    dtypes=("fp16", "bf16"),
    smallest=one_head([[1.0, 1.0]], [[1000.0, 0.0], [1000.0, 1.0]], [[0.0], [1.0]]),
)(kernel(Steps(scores=bf16_scores)))


def add_in_fp16(acc: Tensor, product: Tensor) -> Tensor:
    return (acc + product).half().float()


accumulator_in_fp16 = mutant(
    "attention",
    "P9",
    "P V accumulates in fp16: not yet divided by the row sum, it overflows when many values have one sign.",
    reports="Confirmed: ggml-org/llama.cpp#13975, ikawrakow/ik_llama.cpp#1196.",
    smallest=one_head(ZERO, [[0.0]] * 2, [[49152.0]] * 2),
)(kernel(Steps(accumulate=add_in_fp16)))


def merge_directly(parts: list[Part]) -> Part:
    shares = [torch.exp(log) for _, log in parts]
    total = shares[0] + shares[1]
    return normalise(shares[0] * parts[0][0] + shares[1] * parts[1][0], total), torch.log(total)


split_merge_without_max = mutant(
    "attention",
    "P9",
    "Two splits of the keys are merged by e^LSE, without taking the larger LSE out first.",
    smallest=one_head(ONE, [[100.0]] * 2, [[1.0], [2.0]]),
)(kernel(Steps(splits=2, merge=merge_directly), contract={"preset": "flash", "splits": 2}))


def max_or_zero(old: Tensor, tile: Tensor) -> Tensor:
    top = flash.row_max(old, tile)
    return torch.where(top == -math.inf, 0.0, top)


zero_max_after_hidden_tile = mutant(
    "attention",
    "P9",
    "Scanning from the right, a hidden tile stores 0 as the row's maximum, and lower scores never replace it.",
    reports="Confirmed: Dao-AILab/flash-attention#2082.",
    smallest=one_head([[1.0]] * 33, [[-200.0]] * 33, [[1.0]] * 33, is_causal=True),
)(kernel(Steps(row_max=max_or_zero, right_to_left=True)))


# A legal form where it is not denied: beyond scores of about 1e9 the exponent of the maximum itself overflows.
fused_exponent = mutant(
    "attention",
    "P9",
    "The exponent is fma(s, log2 e, -m') with m' = m log2(e) already rounded, which its contract denies.",
    reports="Reported, for bf16 inputs: pytorch/pytorch#121558 (the cause is believed, not confirmed).",
    dtypes=("fp32",),
    smallest=one_head([[133120.0] * 64], [[133120.0] * 64], ONE, scale=None),
)(kernel(Steps(weights=fused, rescale=fused_rescale), contract={"preset": "fp32", "maximum": "exact"}))


def weights_of_new_max(tile: Tensor, base: Tensor) -> Tensor:
    return torch.exp(tile - torch.maximum(base, tile.amax(-1, keepdim=True)))


lazy_rescaling_mixes_maxima = mutant(
    "attention",
    "P7",
    "A lazy kernel skips the rescale when the maximum grows little, but P already uses the new maximum.",
    reports="Confirmed: meta-pytorch/MSLK#242.",
    smallest=one_head(ONE, [[0.0]] * 32 + [[1.0]], [[0.0]] * 32 + [[1.0]]),
)(kernel(Steps(row_max=lazy_row_max, weights=weights_of_new_max), contract={"preset": "flash", "lag": LAG}))
