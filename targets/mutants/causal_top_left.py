"""The causal mask is aligned to the first key, though the kernel declares bottom-right.

Confirmed in a reference implementation: onnx/onnx#7297. Reported: NVIDIA/cutlass#2336.
Smallest input: causal, one query, two keys.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def from_the_first_key(rows: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(rows)[:, None]


attention = kernel(Steps(causal=from_the_first_key))
