"""Llama 3's frequencies are either kept or divided; the band between them is not smoothed.

Smallest input: four entries, position 8, base 81, trained for 64 positions, factors 1 and 4.
"""

import torch
from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def stepped(base: float, dim: int, scaling: honest.Parameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "llama3":
        return rules.frequencies(base, dim, scaling, length, dtype)
    frequency = rules.plain(base, dim, dtype)
    limits = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = rules.share_by_rotations(frequency, scaling["original_max_position_embeddings"], *limits)
    return rules.blend(frequency, (share >= 1).to(dtype), scaling["factor"])


rope = honest.kernel(honest.Steps(scaled=stepped))
