"""The gradient of an additive mask is multiplied by the scale.

Smallest input: one query, two keys, a mask, a scale other than 1.
"""

from torch import Tensor

from targets.honest.flash_backward import BackwardSteps, backward_kernel


def scaled(ds: Tensor, alpha: float) -> Tensor:
    return ds * alpha


attention_backward = backward_kernel(BackwardSteps(bias_gradient=scaled))
