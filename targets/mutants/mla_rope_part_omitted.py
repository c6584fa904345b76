"""The scores leave the rotary part out.

Smallest input: one key with k_pe = 1.
"""

import torch
from torch import Tensor

from targets.honest import mla as honest
from targets.honest.describe import describe
from targets.honest.flash import Result


@describe("mla", contract={"preset": "flash", "form": "materialised"})
def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Result:
    none = torch.zeros_like(q_pe)
    return honest.materialised(
        q_nope, none, c_kv, k_pe, w_uk, w_uv, scale=scale, is_causal=is_causal, return_lse=return_lse
    )
