"""The output is truncated to the input dtype instead of rounded; what leads to it is float32 throughout.

Smallest input: one head, two keys.
"""

from typing import Any

from torch import Tensor

from targets.honest import mla as honest
from targets.honest.describe import describe
from targets.mutants.output_truncated import truncated


@describe("mla", dtypes=("fp16", "bf16"), contract={"preset": "flash", "form": "materialised"})
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
) -> Any:
    wide = [x.float() for x in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv)]
    out, lse = honest.materialised(*wide, scale=scale, is_causal=is_causal, return_lse=True)
    out = truncated(out, c_kv.dtype)
    return (out, lse) if return_lse else out
