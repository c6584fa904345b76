"""The number of splits follows the batch, though batch invariance is declared.

Reported: deepseek-ai/FlashMLA#212. Smallest input: two sequences, and each of them alone.
"""

from typing import Any

from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe

KERNELS = {n: flash.kernel(flash.Steps(splits=n)) for n in (1, 2)}


@describe("attention", contract={"preset": "flash", "splits": 2}, conventions={"batch_invariant": "yes"})
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    kernel = KERNELS[2 if len(q) == 1 else 1]
    return kernel(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
