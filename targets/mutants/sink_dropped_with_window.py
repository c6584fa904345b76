"""The path with a window knows no sinks.

Reported: sgl-project/sglang#11634. Smallest input: one key, sink 0, window (0, 0).
"""

from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


@describe("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: flash.Window | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    return flash.attention(
        q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask,
        window_size=window_size, sinks=sinks if window_size is None else None, return_lse=return_lse,
    )  # fmt: skip
