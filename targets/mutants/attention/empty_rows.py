"""Rows and tiles that may attend to nothing: their output and their LSE."""

import math

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import EMPTY_ROW, ZERO, one_head, visible
from targets.mutants.mutant import mutant


def divide(acc: Tensor, total: Tensor) -> Tensor:
    return acc / total


empty_row_nan = mutant(
    "attention",
    "P3",
    "A row without keys divides 0 by 0, though the kernel declares that it returns zeros.",
    reports="Confirmed: pytorch/pytorch#81077, ml-explore/mlx#2608.",
    smallest=EMPTY_ROW,
)(kernel(Steps(normalise=divide)))


def unguarded(maximum: Tensor) -> Tensor:
    return maximum


first_tile_hidden_nan = mutant(
    "attention",
    "P4",
    "A first tile that is wholly hidden from a row gives e^(-inf - -inf) = NaN, which no later tile repairs.",
    reports="Reported: pytorch/pytorch#127055.",
    smallest=one_head(ZERO, [[0.0]] * 33, [[1.0]] * 33, attn_mask=visible(*[False] * 32, True)),
)(kernel(Steps(shift=unguarded)))


def plus_inf_if_empty(maximum: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, math.inf, flash.lse(maximum, total))


lse_plus_inf = mutant(
    "attention",
    "P3",
    "The LSE of a row without keys is +inf, though the kernel declares -inf.",
    reports="Reported: Dao-AILab/flash-attention#978.",
    smallest=EMPTY_ROW,
)(kernel(Steps(lse=plus_inf_if_empty)))


def zero_if_empty(maximum: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, 0.0, flash.lse(maximum, total))


lse_finite = mutant(
    "attention",
    "P7",
    "The LSE of a row without keys is 0, though the kernel declares -inf: merging gives such a part weight.",
    reports="Confirmed: vllm-project/vllm#49294.",
    smallest=EMPTY_ROW,
)(kernel(Steps(lse=zero_if_empty)))
