"""What is built and stored, and the gradients of that, are truncated to the input dtype instead of rounded.

Smallest input: one query, two keys.
"""

from targets.honest.mla_backward import Steps, kernel
from targets.mutants.output_truncated import truncated

mla_backward = kernel(Steps(store=truncated), dtypes=("fp16", "bf16"))
