"""The default scale is 1/sqrt(d_h).

Smallest input: two rows.
"""

from typing import Any

from torch import Tensor

from targets.honest import mla
from targets.honest.mla_block import MATERIALISED, Steps, block


def core(q_nope: Tensor, *rest: Tensor, scale: float | None = None, **options: Any) -> Tensor:
    out = mla.materialised(q_nope, *rest, scale=q_nope.shape[-1] ** -0.5 if scale is None else scale, **options)
    assert isinstance(out, Tensor)
    return out


mla_block = block(Steps(core=core), contract=MATERIALISED)
