"""Log-softmax and logsumexp."""

import math

import torch
from torch import Tensor

from targets.honest import softmax
from targets.honest.softmax import divide, row_shift, widen
from targets.mutants.mutant import mutant
from targets.mutants.softmax.inputs import entries


@mutant(
    "log_softmax",
    "P9",
    "log_softmax is the logarithm of softmax: a weight that underflows gives -inf.",
    smallest=entries([0.0, -200.0]),
)
def log_of_softmax(x: Tensor) -> Tensor:
    wide = widen(x)
    e = torch.exp(wide - row_shift(wide))
    return divide(e, e.sum(-1, keepdim=True)).log().to(x.dtype)


@mutant(
    "logsumexp",
    "P9",
    "ln sum e^x without taking the maximum out: inf above 88, -inf below -104.",
    smallest=entries([[1000.0]]),
)
def logsumexp_without_max(x: Tensor) -> Tensor:
    return torch.exp(widen(x)).sum(-1).log().to(x.dtype)


@mutant(
    "logsumexp",
    "P8",
    "The logarithm has base 2, though natural logarithms are declared.",
    smallest=entries([[1.0]]),
)
def logsumexp_base_two(x: Tensor) -> Tensor:
    return (softmax.logsumexp(softmax.widen(x)) / math.log(2.0)).to(x.dtype)
