"""P is truncated to the input dtype for dV, not rounded.

Smallest input: one query, two keys of different scores.
"""

from targets.honest.flash_backward import BackwardSteps, backward_kernel
from targets.mutants.weights_truncated import truncated

attention_backward = backward_kernel(BackwardSteps(cast_weights=truncated), dtypes=("fp16", "bf16"))
