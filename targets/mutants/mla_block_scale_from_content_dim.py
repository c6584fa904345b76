"""The default scale is 1/sqrt(d_h).

Smallest input: two rows.
"""

from targets.honest.mla_block import MATERIALISED, Parameters, Steps, block, scale_of


def of_content(given: float | None, content: int, rotary: int, scaling: Parameters | None) -> float:
    return scale_of(given, content, 0, scaling)


mla_block = block(Steps(scale=of_content), contract=MATERIALISED)
