"""Linear scaling multiplies the frequencies by its factor instead of dividing them.

Smallest input: two entries, position 1, factor 2.
"""

import torch
from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def multiplied(base: float, dim: int, scaling: honest.Parameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "linear":
        return rules.frequencies(base, dim, scaling, length, dtype)
    return rules.plain(base, dim, dtype) * float(scaling["factor"])


rope = honest.kernel(honest.Steps(scaled=multiplied))
