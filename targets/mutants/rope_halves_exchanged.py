"""The rotated halves are joined in the wrong order: norms and scores are right, the vectors are not.

Smallest input: two entries, position 0.
"""

from torch import Tensor

from targets.honest import rope as honest


def joined_backwards(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(second, first, layout)


rope = honest.kernel(honest.Steps(unpair=joined_backwards))
