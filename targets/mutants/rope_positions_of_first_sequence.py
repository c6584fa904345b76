"""Positions `[B, S]` are read for the first sequence and used for all.

Smallest input: two sequences of one token, positions 0 and 1.
"""

from torch import Tensor

from targets.honest import rope as honest


def of_first(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions[:1] if positions.dim() == 3 else positions, frequency)


rope = honest.kernel(honest.Steps(angles=of_first))
