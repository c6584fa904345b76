"""LongRoPE chooses its factors by what the cache could hold, so that short sequences get the long ones.

Reported: ggml-org/llama.cpp#8995.
Smallest input: two entries, position 1, trained for 64 positions, factors 1 and 2.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def long(positions: Tensor, scaling: honest.Parameters | None) -> int:
    if scaling is None or scaling["rope_type"] != "longrope":
        return rules.length_of(positions, scaling)
    return int(scaling["original_max_position_embeddings"]) * 32


rope = honest.kernel(honest.Steps(length=long))
