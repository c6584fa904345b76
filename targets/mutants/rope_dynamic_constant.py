"""Dynamic NTK takes the longest length that the model allows for the sequence's: its base never changes.

Confirmed: vllm-project/vllm#41236.
Smallest input: four entries, position 1, trained for 64 positions, factor 2.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def longest(positions: Tensor, scaling: honest.Parameters | None) -> int:
    if scaling is None or scaling["rope_type"] != "dynamic":
        return rules.length_of(positions, scaling)
    return int(scaling["factor"] * scaling["max_position_embeddings"])


rope = honest.kernel(honest.Steps(length=longest))
