"""The places behind the last key of a page are attended to.

Smallest input: one key in a page of two places.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, paged


def filled(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    return cache[pages].flatten(0, 1)


attention_paged = paged(Gathers(gather=filled))
