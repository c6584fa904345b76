"""The gradient is that of an inverse rotation: it is divided by the magnitude instead of multiplied.

Smallest input: two entries, position 0, YaRN with factor 4.
"""

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest

rope_backward = honest.gradient(honest.Steps(magnitude=lambda scaling: 1 / rules.magnitude(scaling)))
