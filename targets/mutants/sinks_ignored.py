"""Sinks are accepted and dropped.

Reported: NVIDIA/TransformerEngine#3551. Smallest input: one key, sink 0.
"""

from targets.honest.flash import Steps, kernel

attention = kernel(Steps(sink_in=lambda split: False))
