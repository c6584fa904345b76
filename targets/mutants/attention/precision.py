"""A stage rounds more, or otherwise, than the contract says."""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import HONEST, Steps, kernel
from targets.honest.flash_variants import LOG2_E, in_base_two, scores_of_prescaled_query
from targets.mutants.attention.inputs import LONG_ROW, ONE, ZERO, one_head
from targets.mutants.mutant import mutant


def add_and_store_in_bf16(acc: Tensor, product: Tensor) -> Tensor:
    return (acc + product).bfloat16().float()


# Not for bf16 inputs, whose bound has room for it unless values are chosen against it.
accumulator_through_bf16 = mutant(
    "attention",
    "P27",
    "The accumulator passes through bf16 after each tile of keys: small values after a large one get lost.",
    dtypes=("fp32", "fp16"),
    smallest=one_head(ZERO, [[0.0]] * 288, [[8.0]] * 32 + [[1.0], *[[0.0]] * 31] * 8),
)(kernel(Steps(accumulate=add_and_store_in_bf16)))


def sum_in_bf16(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    for weight in torch.split(p, 1, dim=-1):
        total = (total + weight).bfloat16().float()
    return total


denominator_in_bf16 = mutant(
    "attention",
    "P5",
    "The row sum runs in bf16, key by key: it sticks at 256.",
    reports="Reported for a softmax: pytorch/executorch#20089, tenstorrent/tt-metal#52045.",
    dtypes=("fp16", "bf16"),
    smallest=LONG_ROW,
)(kernel(Steps(row_sum=sum_in_bf16)))


def sum_in_fp16(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    for weight in torch.split(p, 1, dim=-1):
        total = (total + weight).half().float()
    return total


denominator_in_fp16 = mutant(
    "attention",
    "P8",
    "The row sum runs in fp16, key by key: it sticks at 2048, and the LSE has fp16's resolution.",
    reports=(
        "Confirmed: sonos/tract#2586. The contract promises a row sum of unrounded P: else an LSE may be "
        "off by the roundings of P."
    ),
    dtypes=("fp16", "bf16"),
    smallest=one_head(ONE, [[0.0], [-1.0]], ONE * 2),
)(kernel(Steps(row_sum=sum_in_fp16), contract={"row_sum": "unrounded"}))


def to_tf32(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_scores(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(to_tf32(q), to_tf32(k), alpha)


tf32_dots = mutant(
    "attention",
    "P1",
    "float32 queries and keys are multiplied in tf32, which keeps 11 of their 24 bits.",
    reports="Confirmed: triton-lang/triton#1671. Reported: evintunador/triton_docs_tutorials#6.",
    dtypes=("fp32",),
    smallest=one_head([[1 + 2**-12]], [[1 + 2**-12]], ONE),
)(kernel(Steps(scores=tf32_scores)))


# The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
log2e_four_digits = mutant(
    "attention",
    "P8",
    "log2(e) is 1.442: in a 16-bit output invisible, in the LSE plain.",
    smallest=one_head(ONE, [[8.0]], ONE),
)(kernel(in_base_two(1.442), contract={"row_sum": "unrounded"}))


def quick_exp(tile: Tensor, base: Tensor) -> Tensor:
    """Exact at whole powers of two; the clamp keeps -inf out of the fraction and NaN in."""
    t = ((tile - base) * LOG2_E).clamp(min=-1000.0)
    whole = t.floor()
    fraction = t - whole
    return (1.0 + fraction * (0.6565 + 0.3435 * fraction)) * torch.exp2(whole)


# The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
exp_quadratic = mutant(
    "attention",
    "P1",
    "exp is 2^floor(t) times a parabola, with a relative error up to 3e-3.",
    smallest=one_head(ONE, [[0.0], [-0.25]], [[0.0], [1.0]]),
)(kernel(Steps(weights=quick_exp, rescale=quick_exp), contract={"row_sum": "unrounded"}))


def amplified(acc: Tensor, total: Tensor) -> Tensor:
    return flash.normalise(acc, total) * 1.01


gain_one_percent = mutant(
    "attention",
    "P5",
    "The output is 1% too large.",
    dtypes=("fp32", "fp16"),
    smallest=one_head(ZERO, ZERO, ONE),
)(kernel(Steps(normalise=amplified)))


# The contract promises a row sum of unrounded P: else an LSE may be off by the roundings of P.
scaled_query_rounded = mutant(
    "attention",
    "P8",
    "q * scale is rounded to the input dtype, undeclared: invisible when the scale is a power of two.",
    dtypes=("fp16", "bf16"),
    smallest=one_head([[1.0] * 3], [[1.0] * 3], ONE, scale=None),
)(kernel(Steps(scores=scores_of_prescaled_query), contract={"row_sum": "unrounded"}))


def times_reciprocal(acc: Tensor, total: Tensor) -> Tensor:
    guess = (0x7EF311C3 - total.contiguous().view(torch.int32)).view(torch.float32)
    for _ in range(2):
        guess = guess * (2.0 - total * guess)
    return torch.where(total == 0, 0.0, acc * guess)


approximate_reciprocal = mutant(
    "attention",
    "P28",
    "The division by the row sum is a bit trick and two Newton steps, good to 2e-4: invisible in 16 bits.",
    dtypes=("fp32",),
    smallest=one_head(ZERO, ZERO, ONE),
)(kernel(Steps(normalise=times_reciprocal)))


def divide_safely(acc: Tensor, total: Tensor) -> Tensor:
    return acc / (total + 1e-5)


denominator_epsilon = mutant(
    "attention",
    "P6",
    "1e-5 is added to the row sum against a division by zero that cannot happen.",
    dtypes=("fp32",),
    smallest=one_head(ZERO, ZERO, ONE),
)(kernel(Steps(normalise=divide_safely)))


def gridded(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores((q.float() * 256.0).round() / 256.0, k, alpha)


query_on_fixed_grid = mutant(
    "attention",
    "P25",
    "q is rounded to multiples of 2^-8, a step fit for values near 1 and blind to small ones.",
    smallest=one_head([[2**-10]], [[2**10]], ONE),
)(kernel(Steps(scores=gridded)))


def in_e4m3(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.to(torch.float8_e4m3fn).to(dtype)


weights_in_e4m3 = mutant(
    "attention",
    "G3",
    "P is cast to e4m3, which keeps 4 bits, for its product with V: undeclared.",
    smallest=one_head(ONE, [[0.0], [-0.09375]], [[0.0], [1.0]]),
)(kernel(Steps(cast=in_e4m3)))


def truncated(p: Tensor, dtype: torch.dtype) -> Tensor:
    near = p.to(dtype)
    return torch.where(near.double() > p.double(), torch.nextafter(near, torch.zeros_like(near)), near)


weights_truncated = mutant(
    "attention",
    "P19",
    "P is truncated to the input dtype instead of rounded, while the row sum adds the exact weights.",
    dtypes=("fp16", "bf16"),
    smallest="one query, two keys of different scores",
)(kernel(Steps(cast=truncated)))


def towards_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Towards zero: the nearest number of the dtype, or its neighbour on the side of zero."""
    near = x.to(dtype)
    return torch.where(near.double().abs() > x.double().abs(), torch.nextafter(near, torch.zeros_like(near)), near)


@mutant(
    "attention",
    "P19",
    "The output is truncated to the input dtype instead of rounded.",
    reports="Reported: triton-lang/triton#11217 (of stores in bf16).",
    dtypes=("fp16", "bf16"),
    smallest="one query, two keys",
)
def output_truncated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    problem = flash.prepare(q, k, v, HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, HONEST, q.dtype)
    return (towards_zero(out, q.dtype), log) if return_lse else towards_zero(out, q.dtype)


@mutant(
    "attention",
    "P23",
    "16-bit inputs come back in float32: the numbers are right, and whoever calls gets another dtype than he gave.",
    dtypes=("fp16", "bf16"),
    smallest="any in 16 bits; the numbers agree, the dtypes do not",
)
def output_promoted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, flash.HONEST, q.dtype)
    return (out, log) if return_lse else out
