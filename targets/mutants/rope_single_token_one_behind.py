"""A call of one token takes the position before its own: right in prefill, wrong from the first decoded token.

Smallest input: two entries, position 1 alone.
"""

from torch import Tensor

from targets.honest import rope as honest


def one_behind(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions - 1 if positions.shape[-1] == 1 else positions, frequency)


rope = honest.kernel(honest.Steps(angles=one_behind))
