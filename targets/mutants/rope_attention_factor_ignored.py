"""A stated attention_factor is not read, and the magnitude follows from the factor.

Reported: vllm-project/vllm#46280.
Smallest input: two entries, position 0, YaRN with factor 4 and attention_factor 1.
"""

from targets.builtin import rope_frequencies_torch as rules
from targets.honest import rope as honest


def derived(scaling: honest.Parameters | None) -> float:
    known = None if scaling is None else {key: value for key, value in scaling.items() if key != "attention_factor"}
    return rules.magnitude(known)


rope = honest.kernel(honest.Steps(magnitude=derived))
