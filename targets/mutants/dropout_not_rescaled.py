"""Weights are dropped, and the others not divided by 1 - p.

Smallest input: one key, dropout_p 0.5; no single output shows it.
"""

import torch
from torch import Tensor

from targets.honest.dropout import Drops, kernel


def as_they_are(weights: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, weights, 0.0)


attention = kernel(Drops(dropped=as_they_are))
