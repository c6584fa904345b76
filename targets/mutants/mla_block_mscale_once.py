"""YaRN's (1 + m ln(s)/10)^2 multiplies the softmax scale once, without its square.

Smallest input: two rows, YaRN with factor 40 and mscale_all_dim 24.
"""

from targets.builtin import rope_frequencies_torch as rules
from targets.honest.mla_block import MATERIALISED, Parameters, Steps, block, scale_of


def once(given: float | None, content: int, rotary: int, scaling: Parameters | None) -> float:
    whole = scale_of(given, content, rotary, scaling)
    return whole if given is not None else whole / float(rules.softmax_factor(scaling) ** 0.5)


mla_block = block(Steps(scale=once), contract=MATERIALISED)
