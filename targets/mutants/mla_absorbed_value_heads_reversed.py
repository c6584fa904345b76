"""The absorbed form applies W_UV with the heads in reverse order.

Smallest input: two heads, one key.
"""

from torch import Tensor

from targets.honest import mla as honest
from targets.honest.describe import describe
from targets.honest.flash import Result


@describe("mla", contract={"preset": "flash", "form": "absorbed"})
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
    return honest.absorbed(
        q_nope, q_pe, c_kv, k_pe, w_uk, w_uv.flip(0), scale=scale, is_causal=is_causal, return_lse=return_lse
    )
