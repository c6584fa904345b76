"""The gradient is rotated forward once more: the sign of sin is not changed.

Smallest input: two entries, position 1.
"""

from targets.honest import rope as honest

rope_backward = honest.gradient(honest.Steps(backward=lambda sin: sin))
