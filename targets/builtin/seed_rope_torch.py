"""Rotary position embedding in PyTorch, half-split pairs (x_i, x_i+d/2), in the common fp32 recipe.

Frequencies, angles and cos/sin tables in float32, the rotation in float32, one rounding to the input's dtype: what
GPT-NeoX and Llama code does when its tables stay in float32. Written from the formula x cos + rotate_half(x) sin.
`rope_backward` is its gradient: the same rotation with the sign of sin changed.
"""

from __future__ import annotations

import torch

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as scaled
from targets.calling.declare import declare

Tensor = torch.Tensor


def table(
    positions: Tensor, width: int, base: float, scaling: RopeParameters | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin `[S, width]` or `[B, 1, S, width]`, each half the same, times the magnitude."""
    length = scaled.length_of(positions, scaling)
    frequency = scaled.frequencies(base, width, scaling, length, torch.float32).to(device)
    angle = scaled.angles(positions, frequency, scaling)
    if angle.ndim == 3:
        angle = angle[:, None]
    both = torch.cat((angle, angle), dim=-1)
    size = scaled.magnitude(scaling)
    return both.cos() * size, both.sin() * size


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned = x[..., :width].to(torch.float32)
    low, high = turned[..., : width // 2], turned[..., width // 2 :]
    out = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((out.to(x.dtype), x[..., width:]), dim=-1)


def rope(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: RopeParameters | None = None,
) -> Tensor:
    """x [B, H, S, D], positions int64 [S] or [B, S] (of three axes: [3, S] or [3, B, S]) -> [B, H, S, D].

    Entries beyond ``rotary_dim`` are unchanged. ``scaling``: transformers' rope_parameters.
    """
    if layout != "half":
        raise ValueError(f"layout {layout!r} is not supported; known: half")
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    return turn(x, *table(positions, width, base, scaling, x.device))


def rope_backward(
    dy: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: RopeParameters | None = None,
) -> Tensor:
    """The gradient dx [B, H, S, D] for dy: rotated back."""
    if layout != "half":
        raise ValueError(f"layout {layout!r} is not supported; known: half")
    width = dy.shape[-1] if rotary_dim is None else rotary_dim
    cos, sin = table(positions, width, base, scaling, dy.device)
    return turn(dy, cos, -sin)


_CLAIMS: dict[str, object] = {
    "dtypes": ("fp32", "fp16", "bf16"),
    "contract": "fp32_angle",
    "conventions": {"layout": "half"},
}
declare(
    rope,
    {
        "op": "rope",
        "description": "PyTorch RoPE, half-split pairs, float32 angles",
        **_CLAIMS,
    },
)
declare(
    rope_backward,
    {
        "op": "rope_backward",
        "description": "gradient of PyTorch RoPE, half-split pairs, float32 angles",
        **_CLAIMS,
    },
)
