"""The backward pass takes dO as ones.

Reported: mindspore-lab/mindone#1438. Smallest input: one query, two keys, a cotangent other than 1.
"""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import UP_TO_32_BITS, describe
from targets.honest.flash_backward import HONEST, Gradients, gradients


@describe("attention_backward", dtypes=UP_TO_32_BITS)
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, scale: float | None = None, is_causal: bool = False
) -> Gradients:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, None)
    return {n: g.to(q.dtype) for n, g in gradients(problem, torch.ones_like(do), k.shape[1], HONEST).items()}
