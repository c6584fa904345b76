"""Eight bits: factors of storage, and weights that the range of e4m3 does not hold."""

import torch
from torch import Tensor

from targets.honest.fp8 import CONTRACT, Factors, Steps, kernel
from targets.mutants.mutant import mutant

fp8_weights_unscaled = mutant(
    "attention",
    "P27",
    "P is cast to e4m3 as it is; a factor of 256 is declared.",
    dtypes=("e4m3",),
    smallest="one key of most of the mass, and one of 2^-11 of it with a large value",
)(kernel(Steps(weight_scale=1.0), contract=CONTRACT))


fp8_normalised_then_cast = mutant(
    "attention",
    "P5",
    "P is divided by its sum and cast to e4m3, unscaled: long rows fall among its subnormals.",
    reports="Reported: ROCm/aiter#5642.",
    dtypes=("e4m3",),
    smallest="1,500 keys of equal score",
)(kernel(Steps(weight_scale=1.0, normalise_first=True), contract=CONTRACT))


def first_half(scores: Tensor) -> Tensor:
    """The maximum of the first half of the keys, unless the rest exceeds it by more than 4 nats."""
    half = (scores.shape[-1] + 1) // 2
    early, top = scores[..., :half].amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    return torch.where(top - early <= 4, early, top)


def saturating(p: Tensor) -> Tensor:
    return p.clamp(max=448.0).to(torch.float8_e4m3fn).float()


fp8_weights_saturate = mutant(
    "attention",
    "P9",
    "The maximum lags, weights beyond e4m3's largest number saturate, and their sum does not.",
    reports="Reported: Dao-AILab/flash-attention#2713.",
    dtypes=("e4m3",),
    smallest="two keys, the second of 2 nats more",
)(kernel(Steps(shift=first_half, cast=saturating), contract=CONTRACT))


def of_first_head(factors: Factors) -> Factors:
    q, k, v = (f if f is None else f[:, :1].expand_as(f) for f in factors)
    return q, k, v


fp8_factors_of_head_zero = mutant(
    "attention",
    "P13",
    "All heads read the factors of the first.",
    reports="Reported: sgl-project/sgl-kernel-xpu#252.",
    dtypes=("e4m3",),
    smallest="two KV heads, one key",
)(kernel(Steps(factors=of_first_head), contract=CONTRACT))


def dropped(factors: Factors) -> Factors:
    return (factors[0], None, None) if factors[0] is not None else factors


fp8_factors_of_keys_dropped = mutant(
    "attention",
    "P17",
    "The factors of k and v are dropped where q has one.",
    reports="Reported: vllm-project/vllm#42580.",
    dtypes=("e4m3",),
    smallest="one key",
)(kernel(Steps(factors=dropped), contract=CONTRACT))


def averaged(factors: Factors) -> Factors:
    q, k, v = (f if f is None else f.mean(1, keepdim=True).expand_as(f) for f in factors)
    return q, k, v


fp8_factors_by_sequence = mutant(
    "attention",
    "P13",
    "Factors by KV head are read as if each sequence had one: the mean of its heads' is taken.",
    reports="Reported: vllm-project/vllm#51363.",
    dtypes=("e4m3",),
    smallest="two KV heads, one key",
)(kernel(Steps(factors=averaged), contract=CONTRACT))
