"""softmax, log_softmax and logsumexp over the last axis in plain torch: reduce in float32, round once.

p_i = e^(x_i - m) / l with m = max x and l = sum e^(x_j - m); logsumexp L = m + ln l. x `[..., n]`; float64
inputs are reduced in float64. A row that is all -inf (or has no entries) gives weights 0 and LSE -inf; its
log_softmax is -inf. +inf or NaN in a row gives NaN.
"""

import math

import torch
from torch import Tensor

from targets.honest.describe import ALL, describe

LOG2_E = math.log2(math.e)


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def row_shift(x: Tensor) -> Tensor:
    """`[..., 1]`: the row's maximum, or 0 where no entry is above -inf."""
    if x.shape[-1] == 0:
        return torch.zeros((*x.shape[:-1], 1), dtype=x.dtype)
    top = x.amax(-1, keepdim=True)
    return torch.where(top == -math.inf, 0.0, top)


def divide(e: Tensor, total: Tensor) -> Tensor:
    """Weights of a row; only an empty row has a zero sum."""
    return torch.where(total == 0, 0.0, e / total)


def subtract(x: Tensor, log: Tensor) -> Tensor:
    """x - log, and -inf where x is: in an empty row -inf - -inf would be NaN."""
    return torch.where((x == -math.inf) & ~log.isnan(), -math.inf, x - log)


@describe("softmax", dtypes=ALL)
def softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    return divide(e, e.sum(-1, keepdim=True)).to(x.dtype)


@describe("softmax", dtypes=ALL)
def softmax_exp2(x: Tensor) -> Tensor:
    """With e^t written as 2^(t log2 e), as on a GPU."""
    wide = widen(x)
    e = torch.exp2((wide - row_shift(wide)) * LOG2_E)
    return divide(e, e.sum(-1, keepdim=True)).to(x.dtype)


@describe("log_softmax", dtypes=ALL)
def log_softmax(x: Tensor) -> Tensor:
    """(x - m) - ln l: a common offset of the row cancels before anything is rounded."""
    wide = widen(x)
    base = row_shift(wide)
    total = torch.exp(wide - base).sum(-1, keepdim=True)
    return subtract(wide - base, total.log()).to(x.dtype)


@describe("log_softmax", dtypes=ALL)
def log_softmax_by_lse(x: Tensor) -> Tensor:
    """x - L: legal, though the rounding of L grows with the offset of x (reported: pytorch/pytorch#38839)."""
    wide = widen(x)
    base = row_shift(wide)
    log = base + torch.exp(wide - base).sum(-1, keepdim=True).log()
    return subtract(wide, log).to(x.dtype)


@describe("logsumexp", dtypes=ALL)
def logsumexp(x: Tensor) -> Tensor:
    """`[...]`: ln of the sum of e^x, in the dtype of x."""
    wide = widen(x)
    base = row_shift(wide)
    return (base + torch.exp(wide - base).sum(-1, keepdim=True).log()).squeeze(-1).to(x.dtype)
