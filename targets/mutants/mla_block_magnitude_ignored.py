"""Frequencies are scaled, but cos and sin are not multiplied by YaRN's or LongRoPE's magnitude.

Smallest input: two rows, YaRN with a stated magnitude of 8.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest.mla_block import ABSORBED, Steps, Turn, block, rotate


def of_unit_length(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    given = x if how.scaling is None else x / rules.magnitude(how.scaling)
    return rotate(given, positions, how)


mla_block = block(Steps(rotate_key=of_unit_length, rotate_query=of_unit_length), contract=ABSORBED)
