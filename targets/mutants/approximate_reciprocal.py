"""The division by the row sum is a bit trick and two Newton steps, good to 2e-4: invisible in 16 bits.

Smallest input: one key with value 1.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel


def times_reciprocal(acc: Tensor, total: Tensor) -> Tensor:
    guess = (0x7EF311C3 - total.contiguous().view(torch.int32)).view(torch.float32)
    for _ in range(2):
        guess = guess * (2.0 - total * guess)
    return torch.where(total == 0, 0.0, acc * guess)


attention = kernel(Steps(normalise=times_reciprocal), dtypes=("fp32",))
