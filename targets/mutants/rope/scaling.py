"""Scaled frequencies: linear, dynamic NTK, Llama 3, YaRN."""

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import YARN, one_token, yarn


def multiplied(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "linear":
        return rules.frequencies(base, dim, scaling, length, dtype)
    return rules.plain(base, dim, dtype) * float(scaling["factor"])


rope_linear_multiplies = mutant(
    "rope",
    "P21",
    "Linear scaling multiplies the frequencies by its factor instead of dividing them.",
    smallest=one_token([1.0, 1.0], 1, scaling={"rope_type": "linear", "factor": 2.0}),
)(honest.kernel(honest.Steps(scaled=multiplied)))


def longest(positions: Tensor, scaling: RopeParameters | None) -> int:
    if scaling is None or scaling["rope_type"] != "dynamic":
        return rules.length_of(positions, scaling)
    return int(scaling["factor"] * scaling["max_position_embeddings"])


rope_dynamic_constant = mutant(
    "rope",
    "P21",
    "Dynamic NTK takes the longest length that the model allows for the sequence's: its base never changes.",
    reports="Confirmed: vllm-project/vllm#41236.",
    smallest=one_token([1.0] * 4, 1, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}),
)(honest.kernel(honest.Steps(length=longest)))


LONGEST: dict[tuple[float, int], int] = {}


def kept(positions: Tensor, scaling: RopeParameters | None) -> int:
    length = rules.length_of(positions, scaling)
    if scaling is None or scaling["rope_type"] != "dynamic":
        return length
    key = float(scaling["factor"]), int(scaling["max_position_embeddings"])
    LONGEST[key] = max(LONGEST.get(key, 0), length)
    return LONGEST[key]


rope_dynamic_keeps_longest = mutant(
    "rope",
    "P15",
    "Dynamic NTK keeps the base of the longest call so far: a shorter one after it is rotated with that.",
    reports="Reported: huggingface/transformers#27227.",
    smallest="two calls with four entries, positions 100 and 1, trained for 64 positions, factor 2",
)(honest.kernel(honest.Steps(length=kept)))


def stepped(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "llama3":
        return rules.frequencies(base, dim, scaling, length, dtype)
    frequency = rules.plain(base, dim, dtype)
    limits = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = rules.share_by_rotations(frequency, scaling["original_max_position_embeddings"], *limits)
    return rules.blend(frequency, (share >= 1).to(dtype), scaling["factor"])


rope_llama3_without_smoothing = mutant(
    "rope",
    "P21",
    "Llama 3's frequencies are either kept or divided; the band between them is not smoothed.",
    smallest=one_token(
        [1.0] * 4,
        8,
        base=81.0,
        scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
)(honest.kernel(honest.Steps(scaled=stepped)))


def reversed_ramp(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "yarn":
        return rules.frequencies(base, dim, scaling, length, dtype)
    frequency = rules.plain(base, dim, dtype)
    share = 1 - rules.yarn_share(frequency, base, dim, scaling)
    return rules.blend(frequency, share, rules.factor_of(scaling))


rope_ramp_reversed = mutant(
    "rope",
    "P21",
    "YaRN divides the fast frequencies by the factor and keeps the slow ones.",
    smallest=one_token([1.0, 1.0], 1, scaling=yarn()),
)(honest.kernel(honest.Steps(scaled=reversed_ramp)))


def truncated(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    return rules.frequencies(base, dim, {**scaling, "truncate": True}, length, dtype)


rope_ramp_always_truncated = mutant(
    "rope",
    "P21",
    "YaRN's ramp always starts and ends at whole pairs, although `truncate` is False.",
    smallest=one_token([1.0] * 4, 100, scaling=yarn(truncate=False, original_max_position_embeddings=6283)),
)(honest.kernel(honest.Steps(scaled=truncated)))


rope_magnitude_ignored = mutant(
    "rope",
    "P21",
    "YaRN's and LongRoPE's magnitude is left out: the frequencies are right, cos and sin are too small.",
    smallest=YARN,
)(honest.kernel(honest.Steps(magnitude=lambda scaling: 1.0)))


rope_magnitude_squared = mutant(
    "rope",
    "P21",
    "The magnitude multiplies the table that has it already: it counts twice.",
    reports="Confirmed: sgl-project/sglang#33558.",
    smallest=YARN,
)(honest.kernel(honest.Steps(magnitude=lambda scaling: rules.magnitude(scaling) ** 2)))


def derived(scaling: RopeParameters | None) -> float:
    known = None if scaling is None else scaling.copy()
    if known is not None:
        known.pop("attention_factor", None)
    return rules.magnitude(known)


rope_attention_factor_ignored = mutant(
    "rope",
    "P21",
    "A stated attention_factor is not read, and the magnitude follows from the factor.",
    reports="Reported: vllm-project/vllm#46280.",
    smallest=one_token([1.0, 1.0], 0, scaling=yarn(attention_factor=1.0)),
)(honest.kernel(honest.Steps(magnitude=derived)))
