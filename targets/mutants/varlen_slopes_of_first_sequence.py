"""Slopes [N, Hq] are read for the first sequence only.

Smallest input: two sequences of one query and two keys, slopes ((0), (1)).
"""

from torch import Tensor

from targets.honest.layouts import Gathers, slopes_of, varlen


def first(slopes: Tensor | None, sequence: int) -> Tensor | None:
    return slopes_of(slopes, 0)


attention_varlen = varlen(Gathers(slopes_of=first))
