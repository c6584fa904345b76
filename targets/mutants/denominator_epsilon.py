"""1e-5 is added to the row sum against a division by zero that cannot happen.

Smallest input: one key with value 1.
"""

from torch import Tensor

from targets.honest.flash import Steps, kernel


def divide_safely(acc: Tensor, total: Tensor) -> Tensor:
    return acc / (total + 1e-5)


attention = kernel(Steps(normalise=divide_safely), dtypes=("fp32",))
