"""Factors by KV head are read as if each sequence had one: the mean of its heads' is taken.

Reported: vllm-project/vllm#51363. Smallest input: two KV heads, one key.
"""

from targets.honest.fp8 import CONTRACT, Factors, Steps, kernel


def averaged(factors: Factors) -> Factors:
    q, k, v = (f if f is None else f.mean(1, keepdim=True).expand_as(f) for f in factors)
    return q, k, v


attention = kernel(Steps(factors=averaged), contract=CONTRACT, dtypes=("e4m3",))
