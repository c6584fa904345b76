"""Rotary position embedding in NumPy, interleaved pairs: each pair (x_2i, x_2i+1) is rotated by position x
base^(-2i/d).

Written from the formula of the RoFormer paper (Su et al., arXiv 2104.09864, equation 34). Angles and tables are
float64, so the result is rounded once, to the input's dtype. `rope_backward`, its gradient, rotates by the negated
angle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.formats import Float64Array, StoredArray
from oracle.ops.rope.parameters import RopeParameters
from targets.builtin.rope_frequencies import by_pair, frequencies, length_of, magnitude
from targets.calling.declare import declare


def turn(x: StoredArray, angle: Float64Array, size: float) -> StoredArray:
    """x [B, H, S, D] turned by angle [S, D/2] or [B, S, D/2], times ``size``."""
    if angle.ndim == 3:
        angle = angle[:, None]
    even, odd = (x[..., i::2].astype(np.float64) for i in (0, 1))
    cos, sin = size * np.cos(angle), size * np.sin(angle)
    out = np.empty(x.shape)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.astype(x.dtype)


def angles(positions: NDArray[np.int64], width: int, base: float, scaling: RopeParameters | None) -> Float64Array:
    """[S, width/2] or [B, S, width/2]: position times frequency, in radians."""
    if scaling is not None and scaling.get("seq_len") == "sequence":
        # Each sequence as a call of its own.
        own: RopeParameters = {**scaling, "seq_len": "call"}
        by_axis = scaling.get("mrope_section") is not None
        if positions.ndim == 1 + by_axis:
            return angles(positions, width, base, own)
        return np.stack([angles(each, width, base, own) for each in np.moveaxis(positions, int(by_axis), 0)])
    length = length_of(positions, scaling)
    return np.asarray(by_pair(positions, scaling) * frequencies(base, width, scaling, length))


def rope(
    x: StoredArray,
    positions: NDArray[np.int64],
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    scaling: RopeParameters | None = None,
) -> StoredArray:
    """x [B, H, S, D], positions int64 [S] or [B, S] -> [B, H, S, D] in x's dtype. ValueError for another layout.

    ``scaling``: transformers' rope_parameters; with sections the positions are [3, S] or [3, B, S].
    """
    if layout != "interleaved":
        raise ValueError(f"layout {layout!r} is not supported; known: interleaved")
    return turn(x, angles(positions, x.shape[-1], base, scaling), magnitude(scaling))


def rope_backward(
    dy: StoredArray,
    positions: NDArray[np.int64],
    *,
    base: float = 10000.0,
    layout: str = "interleaved",
    scaling: RopeParameters | None = None,
) -> StoredArray:
    """The gradient dx [B, H, S, D] for dy. ValueError for another layout."""
    if layout != "interleaved":
        raise ValueError(f"layout {layout!r} is not supported; known: interleaved")
    return turn(dy, -angles(positions, dy.shape[-1], base, scaling), magnitude(scaling))


_CLAIMS: dict[str, object] = {
    "framework": "numpy",
    "dtypes": ("fp32", "fp16", "bf16"),
    "devices": ("cpu",),
    "contract": {"preset": "fp64_angle", "compute": "fp64"},
    "conventions": {"layout": "interleaved"},
}
declare(
    rope,
    {
        "op": "rope",
        "description": "NumPy RoPE, interleaved pairs, float64 angles",
        **_CLAIMS,
    },
)
declare(
    rope_backward,
    {
        "op": "rope_backward",
        "description": "gradient of NumPy RoPE, interleaved pairs, float64 angles",
        **_CLAIMS,
    },
)
