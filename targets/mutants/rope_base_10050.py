"""The base is half a percent too large.

Smallest input: four entries, position 1.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def shifted_base(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base * 1.005, dim, head_dim, dtype)


rope = honest.kernel(honest.Steps(frequencies=shifted_base), dtypes=("fp32",))
