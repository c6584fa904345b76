"""Rotary position embedding in plain torch (Su et al., arXiv 2104.09864, equation 34), with every step
replaceable.

Pair i of the first `rotary_dim` entries is rotated by position * base^(-2i/rotary_dim); the rest passes
through bit for bit. x `[B, H, S, D]`, positions int64 `[S]` or `[B, S]`. Layout `half` pairs (i, i +
rotary_dim/2), `interleaved` pairs (2i, 2i+1). Frequencies, angles, tables and rotation are float32 (float64
for float64 inputs), the output is rounded once: the contract `fp32_angle`. Raises ValueError for an unknown
layout. Scaled frequencies: `targets.builtin.rope_frequencies_torch`. The gradient is the rotation with sin negated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest.describe import ALL, UP_TO_32_BITS, describe

LAYOUTS = ("half", "interleaved")


def width(given: int | None, head_dim: int) -> int:
    return head_dim if given is None else given


def frequencies(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """`[dim/2]`: base^(-2i/dim) (`head_dim` is for those who take the wrong one)."""
    return rules.plain(base, dim, dtype)


def angles(positions: Tensor, frequency: Tensor) -> Tensor:
    """`[..., S, dim/2]`; float32 holds every position up to 2^24."""
    return positions[..., None].to(frequency.dtype) * frequency


def table(angle: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin times `size`, in the compute dtype (`dtype` is that of x, for contracts that store them in it)."""
    return angle.cos() * size, angle.sin() * size


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
    scaled: Callable[[float, int, RopeParameters, int, torch.dtype], Tensor] = rules.frequencies
    length: Callable[[Tensor, RopeParameters | None], int] = rules.length_of
    magnitude: Callable[[RopeParameters | None], float] = rules.magnitude
    by_axis: Callable[[Tensor, Tensor, RopeParameters], Tensor] = rules.angles
    backward: Callable[[Tensor], Tensor] = torch.neg
    angles: Callable[[Tensor, Tensor], Tensor] = angles
    table: Callable[[Tensor, float, torch.dtype], tuple[Tensor, Tensor]] = table
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


def table_of(
    steps: Steps,
    positions: Tensor,
    *,
    base: float,
    dim: int,
    head_dim: int,
    scaling: RopeParameters | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """cos and sin `[S, dim/2]` or `[B, 1, S, dim/2]`, times the magnitude."""
    wide, by_axis = wide_dtype(dtype), rules.sections(scaling) is not None
    if positions.dim() == (3 if by_axis else 2):
        positions = positions.unsqueeze(-2)
    if scaling is None:
        frequency = steps.frequencies(base, dim, head_dim, wide)
    else:
        frequency = steps.scaled(base, dim, scaling, steps.length(positions, scaling), wide)
    angle = steps.by_axis(positions, frequency, scaling) if by_axis and scaling else steps.angles(positions, frequency)
    return steps.table(angle, steps.magnitude(scaling), dtype)


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
        scaling: RopeParameters | None = None,
    ) -> Tensor:
        dim = steps.width(rotary_dim, x.shape[-1])
        cos, sin = table_of(steps, positions, base=base, dim=dim, head_dim=x.shape[-1], scaling=scaling, dtype=x.dtype)
        return apply(x, cos, sin, layout, steps)

    return rope


def gradient(
    steps: Steps = HONEST,
    *,
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
    contract: str | dict[str, object] | None = None,
) -> Callable[..., Tensor]:
    """The gradient of the kernel with these steps."""

    @describe("rope_backward", dtypes=dtypes, contract=contract)
    def rope_backward(
        dy: Tensor,
        positions: Tensor,
        *,
        base: float = 10000.0,
        layout: str = "half",
        rotary_dim: int | None = None,
        scaling: RopeParameters | None = None,
    ) -> Tensor:
        dim = steps.width(rotary_dim, dy.shape[-1])
        cos, sin = table_of(
            steps, positions, base=base, dim=dim, head_dim=dy.shape[-1], scaling=scaling, dtype=dy.dtype
        )
        return apply(dy, cos, steps.backward(sin), layout, steps)

    return rope_backward


rope = kernel(dtypes=ALL)
rope_backward = gradient(dtypes=ALL)


@describe("rope_apply", dtypes=ALL)
def rope_apply(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """The rotation alone; cos and sin `[S, rotary_dim/2]` are exact."""
    return apply(x, cos, sin, layout, HONEST)
