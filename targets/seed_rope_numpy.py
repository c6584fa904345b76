"""Rotary position embedding in NumPy, interleaved pairs: each pair (x_2i, x_2i+1) is rotated by position x
base^(-2i/d).

Written from the formula of the RoFormer paper (Su et al., arXiv 2104.09864, equation 34). Angles and tables are
float64, so the result is rounded once, to the input's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rope(
    x: NDArray[Any], positions: NDArray[Any], *, base: float = 10000.0, layout: str = "interleaved"
) -> NDArray[Any]:
    """x [B, H, S, D], positions int64 [S] or [B, S] -> [B, H, S, D] in x's dtype. ValueError for another layout."""
    if layout != "interleaved":
        raise ValueError(f"layout {layout!r} is not supported; known: interleaved")
    pairs = x.shape[-1] // 2
    frequency = base ** (-2.0 * np.arange(pairs) / x.shape[-1])
    angle = np.asarray(positions)[..., None] * frequency
    if angle.ndim == 3:
        angle = angle[:, None]
    even, odd = (x[..., i::2].astype(np.float64) for i in (0, 1))
    out = np.empty(x.shape)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out.astype(x.dtype)


rope.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "rope",
    "framework": "numpy",
    "dtypes": ("fp32", "fp16", "bf16"),
    "devices": ("cpu",),
    "contract": {"preset": "fp64_angle", "compute": "fp64"},
    "conventions": {"layout": "interleaved"},
    "description": "NumPy RoPE, interleaved pairs, float64 angles",
}
