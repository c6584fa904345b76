"""Two splits of the keys are merged by e^LSE, without taking the larger LSE out first.

Smallest input: two keys with score 100.
"""

import torch

from targets.honest.flash import Part, Steps, kernel, normalise


def merge_directly(parts: list[Part]) -> Part:
    shares = [torch.exp(log) for _, log in parts]
    total = shares[0] + shares[1]
    return normalise(shares[0] * parts[0][0] + shares[1] * parts[1][0], total), torch.log(total)


attention = kernel(Steps(splits=2, merge=merge_directly), contract={"preset": "flash", "splits": 2})
