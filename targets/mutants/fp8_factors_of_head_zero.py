"""All heads read the factors of the first.

Reported: sgl-project/sgl-kernel-xpu#252. Smallest input: two KV heads, one key.
"""

from targets.honest.fp8 import CONTRACT, Factors, Steps, kernel


def of_first_head(factors: Factors) -> Factors:
    q, k, v = (f if f is None else f[:, :1].expand_as(f) for f in factors)
    return q, k, v


attention = kernel(Steps(factors=of_first_head), contract=CONTRACT, dtypes=("e4m3",))
