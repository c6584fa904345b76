"""The entry behind a sequence's last page is read for it: length // page_size counts from zero.

Smallest input: one full page of one key.
"""

from torch import Tensor

from targets.honest.layouts import Gathers, paged


def one_behind(table: Tensor, sequence: int, length: int, page_size: int) -> Tensor:
    pages = table[sequence, : -(-length // page_size)].clone().long()
    if len(pages):
        pages[-1] = table[sequence, min(length // page_size, table.shape[1] - 1)]
    return pages


attention_paged = paged(Gathers(pages_of=one_behind))
