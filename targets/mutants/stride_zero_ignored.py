"""Expanded values are read on in memory instead of again: a stride of 0 is taken for that of a contiguous tensor.

Smallest input: two sequences of two heads with one key, all heads of a sequence alike and expanded.
"""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def read_on(t: Tensor) -> Tensor:
    """The memory in order, from its start again where it ends."""
    if 0 not in t.stride():
        return t
    held = t.untyped_storage().nbytes() // t.element_size() - int(t.storage_offset())
    flat = t.as_strided((held,), (1,))
    return flat[torch.arange(t.numel()) % held].view(t.shape)


@describe("attention")
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
    values = read_on(v)
    return flash.attention(q, k, values, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
