"""q k^T is stored in fp16 before the scale is applied, and overflows.

Confirmed: ultralytics/ultralytics#24990, PaddlePaddle/Paddle#41933.
Smallest input: one key, D = 64, q = k = 40.
"""

from torch import Tensor

from targets.honest import flash


def fp16_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(q, k, 1.0).half().float() * alpha


attention = flash.kernel(flash.Steps(scores=fp16_scores), dtypes=("fp16",))
