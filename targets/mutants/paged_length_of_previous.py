"""A sequence reads the length of the one before it.

Smallest input: two sequences of one query, with one key and with two, in pages of two places.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, paged


def previous(lengths: Tensor, sequence: int) -> int:
    return int(lengths[max(0, sequence - 1)])


attention_paged = paged(Gathers(length_of=previous))
