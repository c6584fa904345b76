"""Every call draws afresh, whatever its seed.

Smallest input: one key, dropout_p 0.5, twice with one seed; no single output shows it.
"""

import torch
from torch import Tensor

from targets.honest.dropout import Drops, kept, kernel


def fresh(shape: torch.Size, p: float, seed: int | None) -> Tensor:
    return kept(shape, p, None)


attention = kernel(Drops(kept=fresh))
