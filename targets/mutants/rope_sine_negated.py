"""The sign of sin is flipped: a rotation, but backwards. Scores between rotated vectors do not show it.

Smallest input: two entries, position 1.
"""

from torch import Tensor

from targets.honest import rope as honest


def backwards(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return honest.rotate(first, second, cos, -sin)


rope = honest.kernel(honest.Steps(rotate=backwards))
