"""The row sum runs in bf16, entry by entry: it sticks at 256.

Reported: pytorch/executorch#20089, tenstorrent/tt-metal#52045. Smallest input: 512 equal entries.
"""

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.softmax import divide, row_shift, widen


@describe("softmax", dtypes=("fp16", "bf16"))
def softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    total = torch.zeros_like(e[..., :1])
    for entry in torch.split(e, 1, dim=-1):
        total = (total + entry).bfloat16().float()
    return divide(e, total).to(x.dtype)
