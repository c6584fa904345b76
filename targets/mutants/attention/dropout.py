"""Dropout: what is kept, when, and what it is divided by."""

import torch
from torch import Tensor

from targets.honest.dropout import Drops, kept, kernel
from targets.mutants.mutant import mutant


def as_they_are(weights: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, weights, 0.0)


dropout_not_rescaled = mutant(
    "attention",
    "P22",
    "Weights are dropped, and the others not divided by 1 - p.",
    smallest="one key, dropout_p 0.5; no single output shows it",
)(kernel(Drops(dropped=as_they_are)))


dropout_in_evaluation = mutant(
    "attention",
    "P22",
    "Dropout stays active outside of training.",
    reports="Reported: pytorch/pytorch#124464.",
    smallest="one key, dropout_p 0.5, training False; no single output shows it",
)(kernel(Drops(rate=lambda p, training: p)))


def summed_after(weights: Tensor, keep: Tensor, p: float) -> Tensor:
    left = torch.where(keep, weights, 0.0)
    return left / left.sum(-1, keepdim=True)


dropout_before_the_sum = mutant(
    "attention",
    "P22",
    "The denominator sums what was not dropped: a row that lost all of its weights is 0 / 0.",
    reports="Reported: aws-neuron/nki-samples#80.",
    smallest="one key, dropout_p 0.5; no single output shows it",
)(kernel(Drops(dropped=summed_after)))


def fresh(shape: torch.Size, p: float, seed: int | None) -> Tensor:
    return kept(shape, p, None)


dropout_seed_ignored = mutant(
    "attention",
    "P22",
    "Every call draws afresh, whatever its seed.",
    smallest="one key, dropout_p 0.5, twice with one seed; no single output shows it",
)(kernel(Drops(kept=fresh)))


def constant(shape: torch.Size, p: float, seed: int | None) -> Tensor:
    return kept(shape, p, 0)


dropout_same_in_every_call = mutant(
    "attention",
    "P22",
    "The seed is a constant: every call drops the same weights.",
    smallest="one key, dropout_p 0.5, twice with two seeds; no single output shows it",
)(kernel(Drops(kept=constant)))
