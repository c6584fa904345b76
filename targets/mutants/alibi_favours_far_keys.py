"""The sign of ALiBi is flipped: far keys gain.

Reported: meta-pytorch/attention-gym#86. Smallest input: one query, two keys, slope 1.
"""

from torch import Tensor

from targets.honest import flash_options
from targets.honest.flash import Steps, kernel


def flipped(rows: int, keys: int) -> Tensor:
    return -flash_options.reach(rows, keys)


attention = kernel(Steps(reach=flipped))
