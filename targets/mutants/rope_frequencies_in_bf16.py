"""The frequencies are stored in bf16: their relative error of 2^-9 grows with the position.

Confirmed: sgl-project/sglang-jax#1472, huggingface/transformers#29285.
Smallest input: four entries, base 1000, position 100.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def stored_in_bf16(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base, dim, head_dim, dtype).bfloat16().to(dtype)


rope = honest.kernel(honest.Steps(frequencies=stored_in_bf16))
