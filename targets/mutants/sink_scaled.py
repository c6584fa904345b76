"""The sink is multiplied by the scale, as scores are.

Reported: ROCm/rocm-libraries#12229. Smallest input: D = 4, one key of score 0, sink 2.
"""

from torch import Tensor

from targets.honest.flash import Steps, compute_dtype, kernel


def scaled(sinks: Tensor, alpha: float) -> Tensor:
    return sinks.to(compute_dtype(sinks.dtype)) * alpha


attention = kernel(Steps(sink_of=scaled))
