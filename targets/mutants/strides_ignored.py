"""Keys are read as if they were contiguous.

Reported: pytorch/pytorch#181133, pytorch/pytorch#112577. Smallest input: two keys of two features, features first in
memory.
"""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def as_if_contiguous(t: Tensor) -> Tensor:
    """The memory from the tensor's first element on, in its shape."""
    strides = torch.empty(t.shape, device="meta").stride()
    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))
    return t if flat.numel() < t.numel() else flat.as_strided(t.shape, strides)


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
    keys = as_if_contiguous(k)
    return flash.attention(q, keys, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
