"""Each of two splits of the keys counts the sink.

Reported: ROCm/rocm-libraries#12229. Smallest input: two keys, sink 0.
"""

from targets.honest.flash import Steps, kernel

attention = kernel(Steps(splits=2, sink_in=lambda split: True), contract={"preset": "flash", "splits": 2})
