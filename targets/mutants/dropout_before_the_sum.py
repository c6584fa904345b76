"""The denominator sums what was not dropped: a row that lost all of its weights is 0 / 0.

Reported: aws-neuron/nki-samples#80. Smallest input: one key, dropout_p 0.5; no single output shows it.
"""

import torch
from torch import Tensor

from targets.honest.dropout import Drops, kernel


def summed_after(weights: Tensor, keep: Tensor, p: float) -> Tensor:
    left = torch.where(keep, weights, 0.0)
    return left / left.sum(-1, keepdim=True)


attention = kernel(Drops(dropped=summed_after))
