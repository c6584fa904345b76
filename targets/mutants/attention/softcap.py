"""Soft caps: their order, their formula, their range."""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import CAPPED, ONE, TWO_KEYS, ZERO, one_head
from targets.mutants.mutant import mutant


def uncapped(tile: Tensor, size: float) -> Tensor:
    return tile


softcap_ignored = mutant(
    "attention",
    "P17",
    "A soft cap is accepted and never applied.",
    reports="Reported: vllm-project/vllm-metal#665, sgl-project/sgl-kernel-xpu#491.",
    smallest=CAPPED,
)(kernel(Steps(cap=uncapped)))


softcap_after_mask = mutant(
    "attention",
    "P17",
    "The soft cap is applied after the additive mask has joined, before it is declared.",
    smallest=one_head(ZERO, *TWO_KEYS, softcap=1.0, attn_mask=torch.tensor([[0.0, 4.0]])),
)(kernel(Steps(cap_last=True)))


def wrong(tile: Tensor, size: float) -> Tensor:
    return tile * torch.tanh(tile)


softcap_multiplies_by_tanh = mutant(
    "attention",
    "P17",
    "The cap is s tanh(s) instead of c tanh(s / c).",
    reports="Reported: Dao-AILab/flash-attention#2402.",
    smallest=CAPPED,
)(kernel(Steps(cap=wrong)))


def quotient(tile: Tensor, size: float) -> Tensor:
    e = torch.exp(2 * tile / size)
    return size * (e - 1) / (e + 1)


softcap_by_exponentials = mutant(
    "attention",
    "P9",
    "tanh(x) = (e^2x - 1) / (e^2x + 1), which is inf / inf for large x.",
    smallest=one_head(ONE, [[200.0]], ONE, softcap=1.0),
)(kernel(Steps(cap=quotient)))
