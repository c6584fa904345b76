"""`layout` is accepted, and pairs are always (i, i + d/2).

Confirmed: kvark/meganeura#38 (one layout where the model has the other). Reported:
vllm-project/vllm-ascend#12820.
Smallest input: four entries, position 1, interleaved.
"""

from torch import Tensor

from targets.honest import rope as honest


def always_half(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return honest.pairs(x, "half")


def join_half(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(first, second, "half")


rope = honest.kernel(honest.Steps(pairs=always_half, unpair=join_half))
