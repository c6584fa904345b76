"""The exponent of the base is i/d instead of 2i/d: all frequencies but the first are too high.

Smallest input: four entries, position 1.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def half_the_exponent(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return 1.0 / base ** (torch.arange(dim // 2).to(dtype) / dim)


rope = honest.kernel(honest.Steps(frequencies=half_the_exponent))
