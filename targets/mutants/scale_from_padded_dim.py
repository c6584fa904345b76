"""The default scale is made from the head dimension after padding to a multiple of 16.

Confirmed: intel/ipex-llm#12619. Smallest input: one key, D = 1.
"""

from targets.honest import flash


def from_padded(given: float | None, head_dim: int) -> float:
    return flash.scale_of(given, head_dim + -head_dim % 16)


attention = flash.kernel(flash.Steps(scale_of=from_padded))
