"""The table has 4096 rows, and a position beyond them reads the last one.

Confirmed, as a read behind the table: microsoft/onnxruntime#27597.
Smallest input: two entries, position 4096.
"""

from torch import Tensor

from targets.honest import rope as honest


def clamped(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.clamp(max=4095), frequency)


rope = honest.kernel(honest.Steps(angles=clamped))
