"""The kernel for a single query knows no sinks.

Reported: ml-explore/mlx#3452. Smallest input: one query and key, sink 0.
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
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    return flash.attention(
        q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask,
        sinks=None if q.shape[2] == 1 else sinks, return_lse=return_lse,
    )  # fmt: skip
