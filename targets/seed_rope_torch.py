"""Rotary position embedding in PyTorch, half-split pairs (x_i, x_i+d/2), in the common fp32 recipe.

Frequencies, angles and cos/sin tables in float32, the rotation in float32, one rounding to the input's dtype: what
GPT-NeoX and Llama code does when its tables stay in float32. Written from the formula x cos + rotate_half(x) sin.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def rope(
    x: Tensor, positions: Tensor, *, base: float = 10000.0, layout: str = "half", rotary_dim: int | None = None
) -> Tensor:
    """x [B, H, S, D], positions int64 [S] or [B, S] -> [B, H, S, D]; entries beyond ``rotary_dim`` unchanged."""
    if layout != "half":
        raise ValueError(f"layout {layout!r} is not supported; known: half")
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
    frequency = 1.0 / (base**exponent)
    angle = positions.to(torch.float32)[..., None] * frequency
    if angle.ndim == 3:
        angle = angle[:, None]
    table = torch.cat((angle, angle), dim=-1)
    turned = x[..., :width].to(torch.float32)
    low, high = turned[..., : width // 2], turned[..., width // 2 :]
    out = turned * table.cos() + torch.cat((-high, low), dim=-1) * table.sin()
    return torch.cat((out.to(x.dtype), x[..., width:]), dim=-1)


rope.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "rope",
    "dtypes": ("fp32", "fp16", "bf16"),
    "contract": "fp32_angle",
    "conventions": {"layout": "half"},
    "description": "PyTorch RoPE, half-split pairs, float32 angles",
}
