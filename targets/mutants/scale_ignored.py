"""`scale` is accepted and 1/sqrt(D) is used.

Confirmed: pytorch/pytorch#174361, ROCm/composable_kernel#526. Smallest input: one key, D = 4, scale = 2.
"""

from targets.honest import flash

attention = flash.kernel(flash.Steps(scale_of=lambda given, head_dim: flash.scale_of(None, head_dim)))
