"""The range reduction counts turns in int16: beyond 32767 the polynomials for sin and cos leave their range.

Confirmed, as sin and cos without a sound range reduction: kekzl/imp#1316. Reported:
tenstorrent/tt-metal#51845.
Smallest input: two entries, position 2^18.
"""

import math

import torch
from torch import Tensor

from targets.honest import rope as honest

TURN = 2.0 * math.pi


def series(rest: Tensor, first: int) -> Tensor:
    """The Taylor polynomial of cos (first = 0) or sin (first = 1), clamped to [-1, 1]."""
    term = rest**first
    total = term
    for n in range(first + 1, first + 20, 2):
        term = -term * rest * rest / (n * (n + 1))
        total = total + term
    return total.clamp(-1.0, 1.0)


def reduced_table(angle: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = angle.double()
    rest = wide - (wide / TURN).round().clamp(-32768, 32767) * TURN
    return series(rest, 0).to(angle.dtype) * size, series(rest, 1).to(angle.dtype) * size


rope = honest.kernel(honest.Steps(table=reduced_table))
