"""The places behind the last key of a page get the weight 0, and 0 * NaN is NaN.

Reported: Dao-AILab/flash-attention#2374. Smallest input: one key in a page of two places, the second NaN.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, gather, paged


def tainted(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    behind = cache[pages].flatten(0, 1)[length:]
    return gather(cache, pages, length) + (0.0 * behind).sum()


attention_paged = paged(Gathers(gather=tainted))
