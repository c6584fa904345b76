"""LongRoPE: which of its two lists of factors a sequence gets."""

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import LONG, one_token


def short(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    return rules.frequencies(base, dim, scaling, length if scaling["rope_type"] == "dynamic" else 0, dtype)


rope_longrope_short_always = mutant(
    "rope",
    "P21",
    "LongRoPE uses its short factors for every sequence.",
    smallest=one_token([1.0, 1.0], 64, scaling=LONG),
)(honest.kernel(honest.Steps(scaled=short)))


def long(positions: Tensor, scaling: RopeParameters | None) -> int:
    if scaling is None or scaling["rope_type"] != "longrope":
        return rules.length_of(positions, scaling)
    return int(scaling["original_max_position_embeddings"]) * 32


rope_longrope_long_always = mutant(
    "rope",
    "P21",
    "LongRoPE chooses its factors by what the cache could hold, so that short sequences get the long ones.",
    reports="Reported: ggml-org/llama.cpp#8995.",
    smallest=one_token([1.0, 1.0], 1, scaling=LONG),
)(honest.kernel(honest.Steps(length=long)))


def counted_from_one(positions: Tensor, scaling: RopeParameters | None) -> int:
    length = rules.length_of(positions, scaling)
    return length + 1 if scaling is not None and scaling["rope_type"] == "longrope" else length


rope_longrope_one_early = mutant(
    "rope",
    "P21",
    "LongRoPE takes the long factors for a sequence of exactly the trained length.",
    reports="Reported: unslothai/unsloth#10681.",
    smallest=one_token([1.0, 1.0], 63, scaling=LONG),
)(honest.kernel(honest.Steps(length=counted_from_one)))
