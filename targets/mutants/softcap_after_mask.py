"""The soft cap is applied after the additive mask has joined, before it is declared.

Smallest input: two keys, cap 1, additive mask (0, 4).
"""

from targets.honest.flash import Steps, kernel

attention = kernel(Steps(cap_last=True))
