"""LongRoPE uses its short factors for every sequence.

Smallest input: two entries, position 64, trained for 64 positions, factors 1 and 2.
"""

import torch
from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def short(base: float, dim: int, scaling: honest.Parameters, length: int, dtype: torch.dtype) -> Tensor:
    return rules.frequencies(base, dim, scaling, length if scaling["rope_type"] == "dynamic" else 0, dtype)


rope = honest.kernel(honest.Steps(scaled=short))
