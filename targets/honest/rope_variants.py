"""Rotations that differ from `rope.rope` in the precision of a stage or in the algebra, and stay honest."""

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as frequencies_torch
from targets.honest import rope
from targets.honest.rope import Steps, gradient, kernel


def frequencies_in_fp64(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return rope.frequencies(base, dim, head_dim, torch.float64)


def stored_table(angle: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin kept in the dtype of x, as models do whose table follows the activations."""
    return (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)


def rotate_as_complex(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(x0 + i x1) e^(i angle), as in Meta's Llama code."""
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return turned.real, turned.imag


def scaled_in_fp64(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    return frequencies_torch.frequencies(base, dim, scaling, length, torch.float64)


def frequencies_by_exp(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """exp(-t ln base), as kernels that have no power function."""
    t = torch.arange(0, dim, 2).to(dtype) / dim
    return torch.exp(-(t * torch.log(torch.tensor(base, dtype=dtype))))


def scaled_once(base: float, dim: int, scaling: RopeParameters, length: int, dtype: torch.dtype) -> Tensor:
    """Frequencies in float64, rounded once: a table of them made on the host."""
    return scaled_in_fp64(base, dim, scaling, length, dtype).to(dtype)


def once(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return frequencies_in_fp64(base, dim, head_dim, dtype).to(dtype)


def negated_angle(positions: Tensor, frequency: Tensor) -> Tensor:
    """The gradient turns by -m: for a backward pass that calls the forward one."""
    return rope.angles(-positions, frequency)


def negated_axes(positions: Tensor, frequency: Tensor, scaling: RopeParameters) -> Tensor:
    return frequencies_torch.angles(-positions, frequency, scaling)


fp64_angle = kernel(Steps(frequencies=frequencies_in_fp64, scaled=scaled_in_fp64), contract="fp64_angle")
input_table = kernel(Steps(table=stored_table), contract="input_table")
complex_product = kernel(Steps(rotate=rotate_as_complex))
exponential = kernel(Steps(frequencies=frequencies_by_exp))
host_frequencies = kernel(Steps(frequencies=once, scaled=scaled_once))
backward_by_position = gradient(Steps(angles=negated_angle, by_axis=negated_axes, backward=lambda sin: sin))
