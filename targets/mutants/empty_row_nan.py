"""A row without keys divides 0 by 0, though the kernel declares that it returns zeros.

Confirmed: pytorch/pytorch#81077, ml-explore/mlx#2608. Smallest input: causal, two queries, one key.
"""

from torch import Tensor

from targets.honest.flash import Steps, kernel


def divide(acc: Tensor, total: Tensor) -> Tensor:
    return acc / total


attention = kernel(Steps(normalise=divide))
