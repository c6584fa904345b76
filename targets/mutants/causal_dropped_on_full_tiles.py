"""When the keys fill their tiles exactly, no tile needs a bounds check, and the causal mask goes with it.

Reported: bledden/triton-msl#7. Smallest input: causal, 32 queries, 32 keys.
"""

import torch
from torch import Tensor

from targets.honest import flash


def only_with_a_tail(rows: int, keys: int) -> Tensor:
    visible = flash.causal(rows, keys)
    return visible if keys % flash.TILE else torch.ones_like(visible)


attention = flash.kernel(flash.Steps(causal=only_with_a_tail))
