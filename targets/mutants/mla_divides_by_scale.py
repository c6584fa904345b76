"""Scores are divided by the scale: too large by d_h + d_r.

Confirmed: AI-Hypercomputer/maxtext#1370. Smallest input: one key, d_h = d_r = 1.
"""

from targets.honest import mla as honest


def reciprocal(given: float | None, content_dim: int, rotary_dim: int) -> float:
    return 1.0 / honest.scale_of(given, content_dim, rotary_dim)


mla = honest.materialised_kernel(honest.Steps(scale_of=reciprocal))
