"""The fraction of the head that is rotated is applied twice.

Confirmed: vllm-project/vllm#30384.
Smallest input: eight entries, rotary_dim 4, position 1: only two are rotated.
"""

from targets.honest import rope as honest


def fraction_squared(given: int | None, head_dim: int) -> int:
    return head_dim if given is None else max(given * given // head_dim // 2 * 2, 2)


rope = honest.kernel(honest.Steps(width=fraction_squared))
