"""YaRN's and LongRoPE's magnitude is left out: the frequencies are right, cos and sin are too small.

Smallest input: two entries, position 0, YaRN with factor 4.
"""

from targets.honest import rope as honest

rope = honest.kernel(honest.Steps(magnitude=lambda scaling: 1.0))
