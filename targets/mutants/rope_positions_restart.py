"""Each call counts its positions from 0: right in prefill, wrong when decoding continues.

Smallest input: two entries, position 1 alone.
"""

from torch import Tensor

from targets.honest import rope as honest


def from_zero(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions - positions[..., :1], frequency)


rope = honest.kernel(honest.Steps(angles=from_zero))
