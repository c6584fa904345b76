"""The output is truncated to the input dtype instead of rounded.

Reported: triton-lang/triton#11217 (of stores in bf16). Smallest input: one query, two keys.
"""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe
from targets.honest.flash import HONEST


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Towards zero: the nearest number of the dtype, or its neighbour on the side of zero."""
    near = x.to(dtype)
    return torch.where(near.double().abs() > x.double().abs(), torch.nextafter(near, torch.zeros_like(near)), near)


@describe("attention", dtypes=("fp16", "bf16"))
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
    problem = flash.prepare(q, k, v, HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, HONEST, q.dtype)
    return (truncated(out, q.dtype), log) if return_lse else truncated(out, q.dtype)
