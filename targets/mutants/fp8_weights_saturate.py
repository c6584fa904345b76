"""The maximum lags, weights beyond e4m3's largest number saturate, and their sum does not.

Reported: Dao-AILab/flash-attention#2713. Smallest input: two keys, the second of 2 nats more.
"""

import torch
from torch import Tensor

from targets.honest.fp8 import CONTRACT, Steps, kernel


def first_half(scores: Tensor) -> Tensor:
    """The maximum of the first half of the keys, unless the rest exceeds it by more than 4 nats."""
    half = (scores.shape[-1] + 1) // 2
    early, top = scores[..., :half].amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    return torch.where(top - early <= 4, early, top)


def saturating(p: Tensor) -> Tensor:
    return p.clamp(max=448.0).to(torch.float8_e4m3fn).float()


attention = kernel(Steps(shift=first_half, cast=saturating), contract=CONTRACT, dtypes=("e4m3",))
