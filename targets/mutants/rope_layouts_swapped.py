"""The names of the two layouts are exchanged.

Smallest input: four entries, position 1.
"""

from torch import Tensor

from targets.honest import rope as honest

OTHER = {"half": "interleaved", "interleaved": "half"}


def other_pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return honest.pairs(x, OTHER[layout])


def other_join(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(first, second, OTHER[layout])


rope = honest.kernel(honest.Steps(pairs=other_pairs, unpair=other_join))
