"""A first tile that is wholly hidden from a row gives e^(-inf - -inf) = NaN, which no later tile repairs.

Reported: pytorch/pytorch#127055. Smallest input: 33 keys, all but the last hidden.
"""

from torch import Tensor

from targets.honest.flash import Steps, kernel


def unguarded(maximum: Tensor) -> Tensor:
    return maximum


attention = kernel(Steps(shift=unguarded))
