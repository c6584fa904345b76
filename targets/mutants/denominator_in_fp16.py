"""The row sum runs in fp16, key by key: it sticks at 2048, and the LSE has fp16's resolution.

Confirmed: sonos/tract#2586.
The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
Smallest input: two keys with scores 0 and -1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def sum_in_fp16(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    for weight in torch.split(p, 1, dim=-1):
        total = (total + weight).half().float()
    return total


attention = kernel(Steps(row_sum=sum_in_fp16), dtypes=("fp16", "bf16"), contract={"row_sum": "unrounded"})
