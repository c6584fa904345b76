"""P V accumulates in fp16: not yet divided by the row sum, it overflows when many values have one sign.

Confirmed: ggml-org/llama.cpp#13975, ikawrakow/ik_llama.cpp#1196.
Smallest input: two equal scores, V = 49152.
"""

from torch import Tensor

from targets.honest.flash import Steps, kernel


def add_in_fp16(acc: Tensor, product: Tensor) -> Tensor:
    return (acc + product).half().float()


attention = kernel(Steps(accumulate=add_in_fp16))
