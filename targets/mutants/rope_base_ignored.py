"""`base` is accepted and 10000 is used.

Smallest input: four entries, position 1, base 100.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def base_10000(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(10000.0, dim, head_dim, dtype)


rope = honest.kernel(honest.Steps(frequencies=base_10000))
