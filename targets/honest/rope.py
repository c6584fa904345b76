"""Rotary position embedding in plain torch (Su et al., arXiv 2104.09864, equation 34), with every step
replaceable.

Pair i of the first `rotary_dim` entries is rotated by position * base^(-2i/rotary_dim); the rest passes
through bit for bit. x `[B, H, S, D]`, positions int64 `[S]` or `[B, S]`. Layout `half` pairs (i, i +
rotary_dim/2), `interleaved` pairs (2i, 2i+1). Frequencies, angles, tables and rotation are float32 (float64
for float64 inputs), the output is rounded once: the contract `fp32_angle`. Raises ValueError for an unknown
layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest.describe import ALL, UP_TO_32_BITS, describe

LAYOUTS = ("half", "interleaved")


def width(given: int | None, head_dim: int) -> int:
    return head_dim if given is None else given


def frequencies(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """`[dim/2]`: base^(-2i/dim) (`head_dim` is for those who take the wrong one)."""
    return 1.0 / base ** (torch.arange(0, dim, 2).to(dtype) / dim)


def angles(positions: Tensor, frequency: Tensor) -> Tensor:
    """`[..., S, dim/2]`; float32 holds every position up to 2^24."""
    return positions[..., None].to(frequency.dtype) * frequency


def table(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin in the compute dtype (`dtype` is that of x, for contracts that store the table in it)."""
    return angle.cos(), angle.sin()


def pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    match layout:
        case "half":
            return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        case "interleaved":
            return x[..., 0::2], x[..., 1::2]
    raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def unpair(first: Tensor, second: Tensor, layout: str) -> Tensor:
    """The inverse of `pairs`."""
    return torch.cat((first, second), -1) if layout == "half" else torch.stack((first, second), -1).flatten(-2)


def rotate(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return first * cos - second * sin, first * sin + second * cos


def output(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Every decision of the rotation; a default is the common recipe."""

    width: Callable[[int | None, int], int] = width
    frequencies: Callable[[float, int, int, torch.dtype], Tensor] = frequencies
    angles: Callable[[Tensor, Tensor], Tensor] = angles
    table: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]] = table
    pairs: Callable[[Tensor, str], tuple[Tensor, Tensor]] = pairs
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    unpair: Callable[[Tensor, Tensor, str], Tensor] = unpair
    output: Callable[[Tensor, torch.dtype], Tensor] = output


HONEST = Steps()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def apply(x: Tensor, cos: Tensor, sin: Tensor, layout: str, steps: Steps) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] entries of x, in the dtype of the table or wider."""
    dim = 2 * cos.shape[-1]
    wide = wide_dtype(x.dtype)
    first, second = steps.pairs(x[..., :dim].to(wide), layout)
    turned = steps.unpair(*steps.rotate(first, second, cos.to(wide), sin.to(wide)), layout)
    return torch.cat((steps.output(turned, x.dtype), x[..., dim:]), -1)


def kernel(
    steps: Steps = HONEST,
    *,
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
    contract: str | dict[str, object] | None = None,
) -> Callable[..., Tensor]:
    """A target function with these steps."""

    @describe("rope", dtypes=dtypes, contract=contract)
    def rope(
        x: Tensor,
        positions: Tensor,
        *,
        base: float = 10000.0,
        layout: str = "half",
        rotary_dim: int | None = None,
    ) -> Tensor:
        dim = steps.width(rotary_dim, x.shape[-1])
        frequency = steps.frequencies(base, dim, x.shape[-1], wide_dtype(x.dtype))
        places = positions if positions.dim() == 1 else positions[:, None]
        cos, sin = steps.table(steps.angles(places, frequency), x.dtype)
        return apply(x, cos, sin, layout, steps)

    return rope


rope = kernel(dtypes=ALL)


@describe("rope_apply", dtypes=ALL)
def rope_apply(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """The rotation alone; cos and sin `[S, rotary_dim/2]` are exact."""
    return apply(x, cos, sin, layout, HONEST)
