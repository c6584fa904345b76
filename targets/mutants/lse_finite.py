"""The LSE of a row without keys is 0, though the kernel declares -inf: merging gives such a part weight.

Confirmed: vllm-project/vllm#49294. Smallest input: causal, two queries, one key.
"""

import torch
from torch import Tensor

from targets.honest import flash


def zero_if_empty(maximum: Tensor, total: Tensor) -> Tensor:
    return torch.where(total == 0, 0.0, flash.lse(maximum, total))


attention = flash.kernel(flash.Steps(lse=zero_if_empty))
