"""A sequence's pages are taken to follow its first one in memory: the table's other entries are not read.

Smallest input: two keys on pages 0 and 2 of one place each.
"""

import torch
from torch import Tensor

from targets.honest.layouts import Gathers, paged


def consecutive(table: Tensor, sequence: int, length: int, page_size: int) -> Tensor:
    count = -(-length // page_size)
    return (table[sequence, :1].long() + torch.arange(count)) % (int(table.max()) + 1)


attention_paged = paged(Gathers(pages_of=consecutive))
