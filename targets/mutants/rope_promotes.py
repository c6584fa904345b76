"""The float32 table promotes the output: 16-bit inputs come back in float32..

Reported: huggingface/pytorch-image-models#2794. Smallest input: two entries, position 1.
"""

import torch
from torch import Tensor

from targets.honest import rope as honest


def unrounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y


rope = honest.kernel(honest.Steps(output=unrounded), dtypes=("fp16", "bf16"))
