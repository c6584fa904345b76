"""Softmax."""

import math

import torch
from torch import Tensor

from targets.honest.softmax import divide, row_shift, widen
from targets.mutants.mutant import mutant
from targets.mutants.softmax.inputs import entries


@mutant(
    "softmax",
    "P9",
    "e^x without subtracting the maximum: overflows above 88, and is 0 / 0 below -104.",
    smallest=entries([1000.0]),
)
def softmax_without_max(x: Tensor) -> Tensor:
    e = torch.exp(widen(x))
    return divide(e, e.sum(-1, keepdim=True)).to(x.dtype)


@mutant(
    "softmax",
    "P5",
    "The row sum runs in bf16, entry by entry: it sticks at 256.",
    reports="Reported: pytorch/executorch#20089, tenstorrent/tt-metal#52045.",
    dtypes=("fp16", "bf16"),
    smallest=entries([0.0] * 512),
)
def softmax_sum_in_bf16(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    total = torch.zeros_like(e[..., :1])
    for entry in torch.split(e, 1, dim=-1):
        total = (total + entry).bfloat16().float()
    return divide(e, total).to(x.dtype)


@mutant(
    "softmax",
    "P1",
    "Every stage runs in the 16-bit input dtype, which the contract does not declare.",
    dtypes=("fp16", "bf16"),
    smallest=entries([0.0, -4.5]),
)
def softmax_in_input_dtype(x: Tensor) -> Tensor:
    e = (x - row_shift(x)).exp()
    return divide(e, e.sum(-1, keepdim=True))


@mutant(
    "softmax",
    "P9",
    "A row that is all -inf gives NaN, though zeros are declared.",
    smallest=entries([-math.inf]),
)
def softmax_empty_row_nan(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


@mutant(
    "softmax",
    "P5",
    "Without an axis, 1-D and 3-D inputs take the first, others the second, as in torch's old rule.",
    smallest=entries([[[0.0, 0.0]]]),
)
def softmax_implicit_axis(x: Tensor) -> Tensor:
    axis = 0 if x.dim() in (1, 3) else 1
    wide = widen(x).movedim(axis, -1)
    e = torch.exp(wide - row_shift(wide))
    return divide(e, e.sum(-1, keepdim=True)).movedim(-1, axis).to(x.dtype)


@mutant(
    "softmax",
    "P18",
    "Entries are summed in pairs: the last of an odd number, from three on, is missing in the sum.",
    smallest=entries([0.0] * 3),
)
def softmax_last_odd_entry_left_out(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    summed = max(x.shape[-1] // 2 * 2, min(x.shape[-1], 1))
    return divide(e, e[..., :summed].sum(-1, keepdim=True)).to(x.dtype)
