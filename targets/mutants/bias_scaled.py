"""The scale is folded over the whole exponent, so that an additive mask is scaled too.

Reported: tenstorrent/tt-metal#55337. Smallest input: D = 4, two keys, additive mask (0, 3).
"""

from torch import Tensor

from targets.honest import flash


def scaled_bias(tile: Tensor, bias: Tensor, alpha: float) -> Tensor:
    return flash.add_bias(tile, bias.to(tile.dtype) * alpha, alpha)


attention = flash.kernel(flash.Steps(add_bias=scaled_bias))
