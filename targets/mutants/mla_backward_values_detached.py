"""The latents get no gradient through the values.

Smallest input: one query, one key.
"""

from targets.honest.describe import UP_TO_32_BITS
from targets.honest.mla_backward import Steps, kernel

mla_backward = kernel(Steps(values_meet_latents=False), dtypes=UP_TO_32_BITS)
