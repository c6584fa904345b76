"""The kernel for a single query knows no window.

Smallest input: window (0, 0), one query, two keys.
"""

import torch
from torch import Tensor

from targets.honest import flash_options
from targets.honest.flash import Steps, kernel


def prefill_only(rows: int, keys: int, left: int, right: int) -> Tensor:
    if rows == 1:
        return torch.ones(rows, keys, dtype=torch.bool)
    return flash_options.window(rows, keys, left, right)


attention = kernel(Steps(window=prefill_only))
