"""Height and width change places: pairs of the one turn by the position of the other.

Smallest input: four entries, positions 0, 1, 2, sections 0, 1, 1.
"""

from torch import Tensor

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def swapped(positions: Tensor, frequency: Tensor, scaling: honest.Parameters) -> Tensor:
    return rules.angles(positions[[0, 2, 1]], frequency, scaling)


rope = honest.kernel(honest.Steps(by_axis=swapped))
