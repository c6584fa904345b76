"""The factors of k and v are dropped where q has one.

Reported: vllm-project/vllm#42580. Smallest input: one key.
"""

from targets.honest.fp8 import CONTRACT, Factors, Steps, kernel


def dropped(factors: Factors) -> Factors:
    return (factors[0], None, None) if factors[0] is not None else factors


attention = kernel(Steps(factors=dropped), contract=CONTRACT, dtypes=("e4m3",))
