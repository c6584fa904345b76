"""The output is 1% too large.

Smallest input: one key with value 1.
"""

from torch import Tensor

from targets.honest import flash


def amplified(acc: Tensor, total: Tensor) -> Tensor:
    return flash.normalise(acc, total) * 1.01


attention = flash.kernel(flash.Steps(normalise=amplified), dtypes=("fp32", "fp16"))
