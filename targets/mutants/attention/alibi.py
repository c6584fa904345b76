"""ALiBi: its sign, and whose slopes are read."""

import torch
from torch import Tensor

from targets.honest import flash_options
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import TWO_KEYS, ZERO, heads, one_head
from targets.mutants.mutant import mutant


def flipped(rows: int, keys: int) -> Tensor:
    return -flash_options.reach(rows, keys)


alibi_favours_far_keys = mutant(
    "attention",
    "P1",
    "The sign of ALiBi is flipped: far keys gain.",
    reports="Reported: meta-pytorch/attention-gym#86.",
    smallest=one_head(ZERO, *TWO_KEYS, alibi_slopes=torch.ones(1)),
)(kernel(Steps(reach=flipped)))


def level(tile: Tensor, slopes: Tensor, reach: Tensor) -> Tensor:
    return tile


alibi_ignored = mutant(
    "attention",
    "P17",
    "Slopes change nothing.",
    smallest=one_head(ZERO, *TWO_KEYS, alibi_slopes=torch.ones(1)),
)(kernel(Steps(alibi=level)))


def first_of_heads(slopes: Tensor, batch: int, heads: int) -> Tensor:
    return flash_options.slopes_of(slopes, batch, heads)[:, :1].expand(batch, heads)


slopes_of_head_zero = mutant(
    "attention",
    "P13",
    "All heads use the ALiBi slope of head 0.",
    smallest=heads(2, 2, alibi_slopes=torch.tensor([0.0, 1.0])),
)(kernel(Steps(slopes_of=first_of_heads)))


def first_of_sequences(slopes: Tensor, batch: int, heads: int) -> Tensor:
    return flash_options.slopes_of(slopes, batch, heads)[:1].expand(batch, heads)


slopes_of_first_sequence = mutant(
    "attention",
    "P13",
    "Slopes [B, Hq] are read for the first sequence only.",
    smallest=heads(1, 1, batch=2, alibi_slopes=torch.tensor([[0.0], [1.0]])),
)(kernel(Steps(slopes_of=first_of_sequences)))
