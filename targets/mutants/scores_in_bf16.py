"""Scaled scores are stored in bf16: two large scores that differ by 1 become equal.

Reported, in the form of wrong outputs on activations with large keys: tenstorrent/tt-metal#21199.
Smallest input: two keys with scores 1000 and 1001.
"""

from torch import Tensor

from targets.honest import flash


def bf16_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(q, k, alpha).bfloat16().float()


attention = flash.kernel(flash.Steps(scores=bf16_scores), dtypes=("fp16", "bf16"))
