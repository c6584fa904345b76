"""A soft cap is accepted and never applied.

Reported: vllm-project/vllm-metal#665, sgl-project/sgl-kernel-xpu#491. Smallest input: D = 1, two keys, cap 1.
"""

from torch import Tensor

from targets.honest.flash import Steps, kernel


def uncapped(tile: Tensor, size: float) -> Tensor:
    return tile


attention = kernel(Steps(cap=uncapped))
