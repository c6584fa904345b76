"""`rotary_dim` is accepted and the whole head is rotated.

Reported: AI-Hypercomputer/maxtext#4742. Smallest input: four entries, rotary_dim 2, position 1.
"""

from targets.honest import rope as honest

rope = honest.kernel(honest.Steps(width=lambda given, head_dim: head_dim))
