"""Contracts: the precision that a target claims for each stage (`oracle.contract.presets`: the usual ones by name).

Every field is a claim about the implementation; the numbers that bounds are made of follow from the fields
(`oracle.contract.constants`).
"""

from __future__ import annotations

from dataclasses import dataclass

from oracle.formats import Format, format_named

ENGINES = ("fma", "h100", "a100", "hopper_fp8")
EXPONENTS = ("natural", "exp2", "scaled")


class UnknownContract(ValueError):
    """A contract field or preset that does not exist; the message lists the valid ones."""


@dataclass(frozen=True, slots=True)
class Contract:
    """One form of one preset. Format names; None means: the input dtype (or ``compute``, where noted).

    compute: format of dots, exp and sums [fp32, fp64; softmax and rope also the input dtype].
    engine: how matrix products sum [fma, h100, a100, hopper_fp8].
    operands: ``tf32`` if fp32 inputs are multiplied in tf32.
    qk_prescale: ``none``; ``compute`` or ``input`` if q, k are scaled and stored before the product.
    scores, score_stores: format of stored scores (None: compute) and how often they are rounded to it.
    shifted: format in which S - m is stored before exp (None: compute).
    weights, weight_scale, normalised_p: format of P in P.V, factor before its cast, whether P is divided by l first.
    row_sum: ``unrounded``, ``rounded`` (sums the cast P) or the format of the running sum.
    accumulator: format of the P.V accumulator (None: compute).
    tile, splits, lag: keys a tile if every tile has a fresh accumulator; split-KV parts; lag of a lazy maximum, nats.
    exp: largest relative error of exp. tanh, tanh_abs: relative and absolute error of the soft cap's tanh.
    output, output_stores, flush: output format and how often O is rounded to it (2 where it is renormalised for a sink
    after it was stored); whether stages flush subnormals.
    saturate: whether what is too large for the output's format becomes its largest number (else inf, or NaN in e4m3).
    lse: ``natural``, ``base2`` or ``absent``. angle, table, rotate: rope stages (None: compute).
    exponent: softmax: ``natural`` exp(x - m); ``exp2`` by one product with log2 e after or fused with the shift;
    ``scaled`` if x log2 e is rounded before the shift. from_lse: softmax, whether the result is formed from a rounded
    L.
    delta: gradients: where D comes from, ``output`` rowsum(dO o O) or ``weights`` sum_j P dP. grad_stores, dp_stored:
    how often dS is rounded to the input format on its way to the products with k and q, whether dP is.
    form, latent, up: mla: ``materialised`` or ``absorbed``; formats of the latent sum and of up-projected k, v or q
    (None: compute). between: blocks: format of what passes between projections, rotation, attention and output
    projection (None: compute). cache: mla_block: format of the kept latents, each row divided by a factor that makes
    its largest entry the format's largest number (None: as between).
    """

    preset: str = "fp32"
    label: str = "plain"
    compute: str = "fp32"
    engine: str = "fma"
    operands: str | None = None
    qk_prescale: str = "none"
    scores: str | None = None
    score_stores: int = 0
    shifted: str | None = None
    weights: str | None = None
    weight_scale: float = 1.0
    normalised_p: bool = False
    row_sum: str = "unrounded"
    accumulator: str | None = None
    tile: int | None = None
    splits: int = 1
    lag: float = 0.0
    exp: float | None = None
    tanh: float | None = None
    tanh_abs: float | None = None
    output: str | None = None
    output_stores: int = 1
    flush: bool = False
    saturate: bool = False
    lse: str = "natural"
    angle: str | None = None
    table: str | None = None
    rotate: str | None = None
    exponent: str = "natural"
    from_lse: bool = False
    delta: str = "output"
    grad_stores: int = 0
    dp_stored: bool = False
    form: str = "materialised"
    latent: str | None = None
    up: str | None = None
    between: str | None = None
    cache: str | None = None


def resolved(name: str | None, input_format: Format) -> Format:
    """The format that a contract's field names: ``input`` and None are that of the inputs."""
    return input_format if name is None or name == "input" else format_named(name)
