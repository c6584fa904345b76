"""The LSE: its base, and what it counts."""

import math
from dataclasses import replace

from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import ONE, ONE_SINK, one_head
from targets.mutants.mutant import mutant


@mutant(
    "attention",
    "P8",
    "The LSE leaves the sink out, and it is declared to be in.",
    smallest=ONE_SINK,
)
def lse_without_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask, sinks=sinks)
    out = flash.attend(problem, flash.HONEST, q.dtype)[0].to(q.dtype)
    return (out, flash.attend(replace(problem, sink=None), flash.HONEST, q.dtype)[1]) if return_lse else out


def in_bits(maximum: Tensor, total: Tensor) -> Tensor:
    return flash.lse(maximum, total) / math.log(2.0)


lse_base_two = mutant(
    "attention",
    "P8",
    "The LSE is returned in base 2, though the kernel declares natural logarithms.",
    reports="Confirmed as a difference between two libraries: flashinfer-ai/flashinfer#2113.",
    smallest=one_head(ONE, ONE, ONE),
)(kernel(Steps(lse=in_bits)))
