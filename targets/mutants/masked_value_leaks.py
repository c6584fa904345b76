"""The zero weight of a hidden key meets its NaN value, though the kernel declares that it blocks this.

Confirmed: vllm-project/vllm#936. Reported: Dao-AILab/flash-attention#2374, pytorch/pytorch#101967.
Smallest input: two keys, the second hidden, with value NaN.
"""

from torch import Tensor

from targets.honest.flash import Masks, Steps, compute_dtype, kernel


def product(p: Tensor, v: Tensor, seen: Masks) -> Tensor:
    wide = compute_dtype(v.dtype)
    return p.to(wide) @ v.to(wide)


attention = kernel(Steps(weigh=product))
