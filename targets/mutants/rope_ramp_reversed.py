"""YaRN divides the fast frequencies by the factor and keeps the slow ones.

Smallest input: two entries, position 1, factor 4.
"""

import torch
from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def reversed_ramp(base: float, dim: int, scaling: honest.Parameters, length: int, dtype: torch.dtype) -> Tensor:
    if scaling["rope_type"] != "yarn":
        return rules.frequencies(base, dim, scaling, length, dtype)
    frequency = rules.plain(base, dim, dtype)
    share = 1 - rules.yarn_share(frequency, base, dim, scaling)
    return rules.blend(frequency, share, rules.factor_of(scaling))


rope = honest.kernel(honest.Steps(scaled=reversed_ramp))
