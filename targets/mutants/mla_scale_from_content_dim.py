"""The default scale is 1/sqrt(d_h) instead of 1/sqrt(d_h + d_r).

Smallest input: one key, d_h = d_r = 1.
"""

from targets.honest import mla as honest


def of_content(given: float | None, content_dim: int, rotary_dim: int) -> float:
    return honest.scale_of(given, content_dim, 0)


mla = honest.materialised_kernel(honest.Steps(scale_of=of_content))
