"""LongRoPE takes the long factors for a sequence of exactly the trained length.

Reported: unslothai/unsloth#10681.
Smallest input: two entries, position 63, trained for 64 positions, factors 1 and 2.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def counted_from_one(positions: Tensor, scaling: honest.Parameters | None) -> int:
    length = rules.length_of(positions, scaling)
    return length + 1 if scaling is not None and scaling["rope_type"] == "longrope" else length


rope = honest.kernel(honest.Steps(length=counted_from_one))
