"""YaRN's ramp always starts and ends at whole pairs, although `truncate` is False.

Smallest input: four entries, position 100, trained for 6283 positions, factor 4.
"""

import torch
from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def truncated(base: float, dim: int, scaling: honest.Parameters, length: int, dtype: torch.dtype) -> Tensor:
    return rules.frequencies(base, dim, {**scaling, "truncate": True}, length, dtype)


rope = honest.kernel(honest.Steps(scaled=truncated))
