"""dS is stored in fp16 whatever the input dtype: small gradients vanish, large ones overflow.

Smallest input: one query, two keys, a cotangent below 2^-25.
"""

import torch
from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def half(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float16)


attention_backward = backward_kernel(BackwardSteps(cast_gradient=half), dtypes=("fp32", "bf16"))
