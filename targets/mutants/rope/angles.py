"""Frequencies and tables: exponent, base, dtype, range."""

import math

import torch
from torch import Tensor

from targets.honest import rope as honest
from targets.honest.rope_variants import stored_table
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import PARTIAL, one_token


def stored_in_bf16(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base, dim, head_dim, dtype).bfloat16().to(dtype)


rope_frequencies_in_bf16 = mutant(
    "rope",
    "P16",
    "The frequencies are stored in bf16: their relative error of 2^-9 grows with the position.",
    reports="Confirmed: sgl-project/sglang-jax#1472, huggingface/transformers#29285.",
    smallest=one_token([1.0] * 4, 100, base=1000.0),
)(honest.kernel(honest.Steps(frequencies=stored_in_bf16)))


def half_the_exponent(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return 1.0 / base ** (torch.arange(dim // 2).to(dtype) / dim)


rope_exponent_of_pair = mutant(
    "rope",
    "P1",
    "The exponent of the base is i/d instead of 2i/d: all frequencies but the first are too high.",
    smallest=one_token([1.0] * 4, 1),
)(honest.kernel(honest.Steps(frequencies=half_the_exponent)))


def of_head_dim(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base, head_dim, head_dim, dtype)[: dim // 2]


rope_exponent_of_head_dim = mutant(
    "rope",
    "P17",
    "With a partial rotation, the exponent of the base is 2i over the head dimension instead of over rotary_dim.",
    reports="Confirmed: pie-project/pie#603.",
    smallest=PARTIAL,
)(honest.kernel(honest.Steps(frequencies=of_head_dim)))


def shifted_base(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(base * 1.005, dim, head_dim, dtype)


rope_base_10050 = mutant(
    "rope",
    "P1",
    "The base is half a percent too large.",
    dtypes=("fp32",),
    smallest=one_token([1.0] * 4, 1),
)(honest.kernel(honest.Steps(frequencies=shifted_base)))


def base_10000(base: float, dim: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return honest.frequencies(10000.0, dim, head_dim, dtype)


rope_base_ignored = mutant(
    "rope",
    "P17",
    "`base` is accepted and 10000 is used.",
    smallest=one_token([1.0] * 4, 1, base=100.0),
)(honest.kernel(honest.Steps(frequencies=base_10000)))


rope_table_in_input_dtype = mutant(
    "rope",
    "P1",
    "cos and sin are stored in the input dtype, which the contract does not declare.",
    reports=(
        "Confirmed, for a whole table built in 16 bits: EleutherAI/gpt-neox#1003. Reported: "
        "Dao-AILab/flash-attention#823."
    ),
    dtypes=("fp16", "bf16"),
    smallest=one_token([1.0, 1.0], 1),
)(honest.kernel(honest.Steps(table=stored_table)))


def clamped(positions: Tensor, frequency: Tensor) -> Tensor:
    return honest.angles(positions.clamp(max=4095), frequency)


rope_table_too_short = mutant(
    "rope",
    "P16",
    "The table has 4096 rows, and a position beyond them reads the last one.",
    reports="Confirmed, as a read behind the table: microsoft/onnxruntime#27597.",
    smallest=one_token([1.0, 1.0], 4096),
)(honest.kernel(honest.Steps(angles=clamped)))


TURN = 2.0 * math.pi


def series(rest: Tensor, first: int) -> Tensor:
    """The Taylor polynomial of cos (first = 0) or sin (first = 1), clamped to [-1, 1]."""
    term = rest**first
    total = term
    for n in range(first + 1, first + 20, 2):
        term = -term * rest * rest / (n * (n + 1))
        total = total + term
    return total.clamp(-1.0, 1.0)


def reduced_table(angle: Tensor, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = angle.double()
    rest = wide - (wide / TURN).round().clamp(-32768, 32767) * TURN
    return series(rest, 0).to(angle.dtype) * size, series(rest, 1).to(angle.dtype) * size


rope_turns_saturate = mutant(
    "rope",
    "P16",
    "The range reduction counts turns in int16: beyond 32767 the polynomials for sin and cos leave their range.",
    reports=(
        "Confirmed, as sin and cos without a sound range reduction: kekzl/imp#1316. Reported: "
        "tenstorrent/tt-metal#51845."
    ),
    smallest=one_token([1.0, 1.0], 2**18),
)(honest.kernel(honest.Steps(table=reduced_table)))
