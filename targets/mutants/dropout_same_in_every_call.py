"""The seed is a constant: every call drops the same weights.

Smallest input: one key, dropout_p 0.5, twice with two seeds; no single output shows it.
"""

import torch
from torch import Tensor

from targets.honest.dropout import Drops, kept, kernel


def constant(shape: torch.Size, p: float, seed: int | None) -> Tensor:
    return kept(shape, p, 0)


attention = kernel(Drops(kept=constant))
