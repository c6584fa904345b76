"""Dynamic NTK keeps the base of the longest call so far: a shorter one after it is rotated with that.

Reported: huggingface/transformers#27227.
Smallest input: two calls with four entries, positions 100 and 1, trained for 64 positions, factor 2.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest

LONGEST: dict[tuple[float, int], int] = {}


def kept(positions: Tensor, scaling: honest.Parameters | None) -> int:
    length = rules.length_of(positions, scaling)
    if scaling is None or scaling["rope_type"] != "dynamic":
        return length
    key = float(scaling["factor"]), int(scaling["max_position_embeddings"])
    LONGEST[key] = max(LONGEST.get(key, 0), length)
    return LONGEST[key]


rope = honest.kernel(honest.Steps(length=kept))
