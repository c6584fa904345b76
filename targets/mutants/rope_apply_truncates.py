"""The rotation's result is cut to 16 bits instead of being rounded: every output is biased towards zero.

Confirmed, for bf16 multiplications: triton-lang/triton#11217.
Smallest input: two entries (137/128, 0), cos = 241/256.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest
from targets.honest.describe import describe


def cut(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 without its lower 16 bits is the bf16 next to it on the side of zero."""
    return (y.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


STEPS = honest.Steps(output=cut)


@describe("rope_apply", dtypes=("bf16",))
def rope_apply(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    return honest.apply(x, cos, sin, layout, STEPS)
