"""Interleaved sections are read as three runs of pairs.

Confirmed: vllm-project/vllm-gaudi#1437.
Smallest input: twelve entries, positions 0, 1, 2, sections 2, 2, 2.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def in_runs(positions: Tensor, frequency: Tensor, scaling: honest.Parameters) -> Tensor:
    return rules.angles(positions, frequency, {**scaling, "mrope_interleaved": False})


rope = honest.kernel(honest.Steps(by_axis=in_runs))
