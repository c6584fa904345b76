"""`scaling` is accepted and plain frequencies are used.

Smallest input: two rows, linear scaling by 4.
"""

from dataclasses import replace

from torch import Tensor

from targets.honest.mla_block import MATERIALISED, Steps, Turn, block, rotate


def plain(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    return rotate(x, positions, replace(how, scaling=None))


mla_block = block(Steps(rotate_key=plain, rotate_query=plain), contract=MATERIALISED)
