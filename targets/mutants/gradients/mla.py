"""Backward passes of multi-head latent attention."""

import torch
from torch import Tensor

from targets.honest.mla_backward import Steps, kernel
from targets.mutants.attention.precision import towards_zero
from targets.mutants.gradients.inputs import latents
from targets.mutants.mutant import mutant


def nothing(delta: Tensor) -> Tensor:
    return torch.zeros_like(delta)


mla_backward_delta_dropped = mutant(
    "mla_backward",
    "P1",
    "dS = P o dP: the row sums are left out.",
    smallest=latents(1.0),
)(kernel(Steps(delta=nothing)))


def first(x: Tensor) -> Tensor:
    return x[:, 0]


mla_backward_first_head_only = mutant(
    "mla_backward",
    "P18",
    "The gradients of what all heads share are those of the first head.",
    smallest=latents(1.0, 1.0),
)(kernel(Steps(add_heads=first)))


def reversed_heads(x: Tensor) -> Tensor:
    return x.flip(1)


mla_backward_absorbed_key_weights_reversed = mutant(
    "mla_backward",
    "P1",
    "Absorbed: the gradient of W_UK is that of the heads in reverse.",
    smallest=latents(1.0, -1.0, keys=2),
)(kernel(Steps(query_gradient=reversed_heads), absorbed=True))


mla_backward_intermediates_truncated = mutant(
    "mla_backward",
    "G3",
    "What is built and stored, and the gradients of that, are truncated to the input dtype instead of rounded.",
    dtypes=("fp16", "bf16"),
    smallest="one query, two keys",
)(kernel(Steps(store=towards_zero)))


mla_backward_values_detached = mutant(
    "mla_backward",
    "P1",
    "The latents get no gradient through the values.",
    smallest=latents(1.0),
)(kernel(Steps(values_meet_latents=False)))
