"""The prefix sums of the queries are used for the keys too.

Smallest input: two sequences of one query each, the first with two keys and the second with one.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, span, varlen


def by_queries(q_sums: Tensor, k_sums: Tensor, sequence: int) -> slice:
    return span(q_sums.clamp(max=k_sums[-1]), sequence)


attention_varlen = varlen(Gathers(keys_of=by_queries))
