"""Positions: their precision, their start, whose they are, and what a second call gets."""

import torch
from torch import Tensor

from targets.honest import rope as honest
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import one_token, two_sequences


def from_bf16(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.to(torch.bfloat16), frequency)


rope_positions_in_bf16 = mutant(
    "rope",
    "P16",
    "Positions pass through bf16: from 257 on, neighbours share one.",
    reports="Confirmed: huggingface/transformers#29285.",
    smallest=one_token([1.0, 1.0], 257),
)(honest.kernel(honest.Steps(angles=from_bf16)))


def from_fp16(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.to(torch.float16), frequency)


rope_positions_in_fp16 = mutant(
    "rope",
    "P16",
    "Positions pass through fp16: from 2049 on, neighbours share one.",
    reports="Reported: NVIDIA/Megatron-LM#535.",
    smallest=one_token([1.0, 1.0], 2049),
)(honest.kernel(honest.Steps(angles=from_fp16)))


def from_zero(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions - positions[..., :1], frequency)


rope_positions_restart = mutant(
    "rope",
    "P16",
    "Each call counts its positions from 0: right in prefill, wrong when decoding continues.",
    smallest=one_token([1.0, 1.0], 1),
)(honest.kernel(honest.Steps(angles=from_zero)))


def of_first(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions[:1] if positions.dim() == 3 else positions, frequency)


rope_positions_of_first_sequence = mutant(
    "rope",
    "P16",
    "Positions `[B, S]` are read for the first sequence and used for all.",
    smallest=two_sequences,
)(honest.kernel(honest.Steps(angles=of_first)))


def one_behind(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions - 1 if positions.shape[-1] == 1 else positions, frequency)


rope_single_token_one_behind = mutant(
    "rope",
    "P10",
    "A call of one token takes the position before its own: right in prefill, wrong from the first decoded token.",
    smallest=one_token([1.0, 1.0], 1),
)(honest.kernel(honest.Steps(angles=one_behind)))


CACHE: dict[tuple[object, ...], Tensor] = {}


def cached(positions: Tensor, frequency: Tensor) -> Tensor:
    """The frequencies are part of the key, so that only the positions go stale."""
    key = (tuple(positions.shape), frequency.dtype, tuple(frequency.tolist()))
    if key not in CACHE:
        CACHE[key] = honest.angles(positions, frequency)
    return CACHE[key]


rope_cached_by_length = mutant(
    "rope",
    "P15",
    "Angles are cached by their shape: a second call with other positions gets those of the first.",
    reports="Confirmed: lucidrains/rotary-embedding-torch#11.",
    smallest="two calls with two entries, positions 1 and 2",
)(honest.kernel(honest.Steps(angles=cached)))
