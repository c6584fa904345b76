"""exp is 2^floor(t) times a parabola, with a relative error up to 3e-3.

The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
Smallest input: two keys with scores 0 and -0.25.
"""

import torch
from torch import Tensor

from targets.honest.flash import Steps, kernel
from targets.honest.flash_variants import LOG2_E


def quick_exp(tile: Tensor, base: Tensor) -> Tensor:
    """Exact at whole powers of two; the clamp keeps -inf out of the fraction and NaN in."""
    t = ((tile - base) * LOG2_E).clamp(min=-1000.0)
    whole = t.floor()
    fraction = t - whole
    return (1.0 + fraction * (0.6565 + 0.3435 * fraction)) * torch.exp2(whole)


attention = kernel(Steps(weights=quick_exp, rescale=quick_exp), contract={"row_sum": "unrounded"})
