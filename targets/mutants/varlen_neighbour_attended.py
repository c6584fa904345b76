"""A sequence whose keys do not fill a tile of four also reads those of the next one that lie in it.

Smallest input: two sequences of one query and one key.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, span, varlen


def whole_tiles(q_sums: Tensor, k_sums: Tensor, sequence: int) -> slice:
    own = span(k_sums, sequence)
    stop = own.start + -(-(own.stop - own.start) // 4) * 4
    return slice(own.start, min(stop, int(k_sums[-1])))


attention_varlen = varlen(Gathers(keys_of=whole_tiles))
