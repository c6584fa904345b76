"""The causal mask is aligned to the last key, though the kernel declares top-left.

Smallest input: causal, one query, two keys.
"""

from targets.honest.flash import kernel

attention = kernel(conventions={"causal_alignment": "top_left"})
