"""Rotations that differ from `rope.rope` in the precision of a stage or in the algebra, and stay honest."""

import torch
from torch import Tensor

from targets.honest import rope
from targets.honest.rope import Steps, kernel


def frequencies_in_fp64(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return rope.frequencies(base, dim, head_dim, torch.float64)


def stored_table(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin kept in the dtype of x, as models do whose table follows the activations."""
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_as_complex(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(x0 + i x1) e^(i angle), as in Meta's Llama code."""
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return turned.real, turned.imag


fp64_angle = kernel(Steps(frequencies=frequencies_in_fp64), contract="fp64_angle")
input_table = kernel(Steps(table=stored_table), contract="input_table")
complex_product = kernel(Steps(rotate=rotate_as_complex))
