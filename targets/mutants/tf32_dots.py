"""float32 queries and keys are multiplied in tf32, which keeps 11 of their 24 bits.

Confirmed: triton-lang/triton#1671. Reported: evintunador/triton_docs_tutorials#6.
Smallest input: one key, D = 1, q = k = 1 + 2^-12: the LSE loses the 2^-11.
"""

import torch
from torch import Tensor

from targets.honest import flash


def to_tf32(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(to_tf32(q), to_tf32(k), alpha)


attention = flash.kernel(flash.Steps(scores=tf32_scores), dtypes=("fp32",))
