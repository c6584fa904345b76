"""The shared rotary key is not rotated.

Smallest input: two rows, the second at position 1.
"""

from torch import Tensor

from targets.honest.mla_block import MATERIALISED, Steps, Turn, block


def unturned(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    return x.clone()


mla_block = block(Steps(rotate_key=unturned), contract=MATERIALISED)
