"""The magnitude multiplies the table that has it already: it counts twice.

Confirmed: sgl-project/sglang#33558.
Smallest input: two entries, position 0, YaRN with factor 4.
"""

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest

rope = honest.kernel(honest.Steps(magnitude=lambda scaling: rules.magnitude(scaling) ** 2))
