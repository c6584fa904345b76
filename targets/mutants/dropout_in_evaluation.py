"""Dropout stays active outside of training.

Reported: pytorch/pytorch#124464. Smallest input: one key, dropout_p 0.5, training False; no single output shows it.
"""

from targets.honest.dropout import Drops, kernel

attention = kernel(Drops(rate=lambda p, training: p))
