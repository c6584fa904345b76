"""With a partial rotation, the exponent of the base is 2i over the head dimension instead of over rotary_dim.

Confirmed: pie-project/pie#603. Smallest input: eight entries, rotary_dim 4, position 1.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def of_head_dim(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base, head_dim, head_dim, dtype)[: dim // 2]


rope = honest.kernel(honest.Steps(frequencies=of_head_dim))
