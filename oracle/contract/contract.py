"""Contracts: the precision that a target claims for each stage (`oracle.contract.presets`: the usual ones by name).

Every field is a claim about the implementation; the numbers that bounds are made of follow from the fields
(`oracle.contract.constants`). Fields stand in groups, and no group with an impossible value can be made. Users write a
flat dict (`FIELDS`: its names and where they belong).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any

from oracle.formats import FORMATS, Format, format_named

ENGINES = ("fma", "h100", "a100", "hopper_fp8")
EXPONENTS = ("natural", "exp2", "scaled")
MAXIMA = ("exact", "rounded")
_STORED = (None, "input", *FORMATS)


class UnknownContract(ValueError):
    """A contract field, value or preset that does not exist; the message lists the valid ones."""


@dataclass(frozen=True, slots=True)
class _OneOf:
    values: tuple[object, ...]

    def holds(self, value: object) -> bool:
        # True equals 1 and 1.0, which as a claim is a mistake.
        return any(type(value) is type(known) and value == known for known in self.values)

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of type ``kind`` (a float may be a whole one) in [least, below), or above least if that is ``open``."""

    kind: type
    least: float
    below: float = 2.0**1023
    open: bool = False
    none: bool = False

    def holds(self, value: object) -> bool:
        if value is None:
            return self.none
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        return (value > self.least if self.open else value >= self.least) and value < self.below

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a finite number"
        upper = f", below {self.below:g}" if self.below < 2.0**1023 else ""
        return f"{'None, ' * self.none}{noun} {'above' if self.open else 'from'} {self.least:g}{upper}"


@dataclass(frozen=True, slots=True)
class _Text:
    def holds(self, value: object) -> bool:
        return isinstance(value, str)

    def __str__(self) -> str:
        return "a string"


_Valid = _OneOf | _Number | _Text


def _claim(default: object, valid: _Valid, *, flat: str | None = None) -> Any:
    """A field with what it may hold; flat: the name users give it, if not its own."""
    return field(default=default, metadata={"valid": valid, "flat": flat})


def _named(default: str | None, *values: str | None, flat: str | None = None) -> Any:
    return _claim(default, _OneOf(values), flat=flat)


def _stored(*, flat: str | None = None) -> Any:
    return _named(None, *_STORED, flat=flat)


def _switch(*, flat: str | None = None) -> Any:
    return _claim(False, _OneOf((False, True)), flat=flat)


def _count(default: int, *, least: int, flat: str | None = None) -> Any:
    return _claim(default, _Number(int, least), flat=flat)


def _error() -> Any:
    return _claim(None, _Number(float, 0.0, below=1.0, none=True))


class _Validated:
    """A dataclass whose claims are checked when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for claim in fields(self):  # type: ignore[arg-type]
            value, valid = getattr(self, claim.name), claim.metadata.get("valid")
            if valid is not None and not valid.holds(value):
                raise UnknownContract(f"contract field {_flat(claim)} is {value!r}; valid: {valid}")


def _flat(claim: Field[Any]) -> str:
    return claim.metadata.get("flat") or claim.name


@dataclass(frozen=True, slots=True)
class ArithmeticClaims(_Validated):
    """The unit that computes.

    compute: format of dots, exp and sums (``input``: softmax and rope alone). engine: how matrix products sum.
    operands: ``tf32`` if fp32 inputs are multiplied in tf32. flush: whether stages flush subnormals. exp: largest
    relative error of exp. tanh, tanh_abs: relative and absolute error of the soft cap's tanh.
    """

    compute: str = _named("fp32", "input", *FORMATS)
    engine: str = _named("fma", *ENGINES)
    operands: str | None = _named(None, None, "tf32")
    flush: bool = _switch()
    exp: float | None = _error()
    tanh: float | None = _error()
    tanh_abs: float | None = _error()


@dataclass(frozen=True, slots=True)
class ScoreClaims(_Validated):
    """Scores S, up to their exponential.

    prescale: ``none``; ``compute`` or ``input`` if q, k are scaled and stored before the product. stored_as, stores:
    format of stored scores (None: compute) and how often they are rounded to it. shifted: format in which S - m is
    stored before exp (None: compute). exponent: softmax: ``natural`` exp(x - m); ``exp2`` by one product with log2 e
    after or fused with the shift; ``scaled`` if x log2 e is rounded before the shift. maximum: ``exact`` if the weight
    of the largest score is 1; ``rounded`` if the product of the maximum and log2 e is rounded before a fused
    multiply-add subtracts it (FlashAttention).
    """

    prescale: str = _named("none", "none", "compute", "input", flat="qk_prescale")
    stored_as: str | None = _stored(flat="scores")
    stores: int = _count(0, least=0, flat="score_stores")
    shifted: str | None = _stored()
    exponent: str = _named("natural", *EXPONENTS)
    maximum: str = _named("exact", *MAXIMA)


@dataclass(frozen=True, slots=True)
class WeightClaims(_Validated):
    """P in P.V: its format, the factor before its cast, whether it is divided by l first."""

    cast_to: str | None = _stored(flat="weights")
    scale: float = _claim(1.0, _Number(float, 0.0, open=True), flat="weight_scale")
    normalised: bool = _switch(flat="normalised_p")


@dataclass(frozen=True, slots=True)
class SumClaims(_Validated):
    """Sums over keys.

    row_sum: ``unrounded``, ``rounded`` (sums the cast P) or the format of the running sum. accumulator: format of the
    P.V accumulator (None: compute). tile, splits, lag: keys a tile if every tile has a fresh accumulator; split-KV
    parts; lag of a lazy maximum, nats.
    """

    row_sum: str = _named("unrounded", "unrounded", "rounded", *FORMATS)
    accumulator: str | None = _named(None, None, *FORMATS)
    tile: int | None = _claim(None, _Number(int, 1, none=True))
    splits: int = _count(1, least=1)
    lag: float = _claim(0.0, _Number(float, 0.0, below=700.0))


@dataclass(frozen=True, slots=True)
class OutputClaims(_Validated):
    """What is put out.

    stored_as, stores: format and how often O is rounded to it (2 where it is renormalised for a sink after it was
    stored). saturate: whether what is too large for the format becomes its largest number (else inf, or NaN in e4m3).
    lse: the base of L, or ``absent``. from_lse: softmax, whether the result is formed from a rounded L.
    """

    stored_as: str | None = _stored(flat="output")
    stores: int = _count(1, least=1, flat="output_stores")
    saturate: bool = _switch()
    lse: str = _named("natural", "natural", "base2", "absent")
    from_lse: bool = _switch()


@dataclass(frozen=True, slots=True)
class RopeClaims(_Validated):
    """Formats of the stages of a rotation (None: compute)."""

    angle: str | None = _stored()
    table: str | None = _stored()
    rotate: str | None = _stored()


@dataclass(frozen=True, slots=True)
class LatentClaims(_Validated):
    """Latent attention and blocks.

    form: evaluation order. summed, up: formats of the latent sum and of up-projected k, v or q (None: compute).
    between: blocks: format of what passes between projections, rotation, attention and output projection (None:
    compute). cache: mla_block: format of the kept latents, each row divided by a factor that makes its largest entry
    the format's largest number (None: as between).
    """

    form: str = _named("materialised", "materialised", "absorbed")
    summed: str | None = _stored(flat="latent")
    up: str | None = _stored()
    between: str | None = _stored()
    cache: str | None = _stored()


@dataclass(frozen=True, slots=True)
class GradientClaims(_Validated):
    """delta: where D comes from, ``output`` rowsum(dO o O) or ``weights`` sum_j P dP. stores, dp_stored: how often dS
    is rounded to the input format on its way to the products with k and q, whether dP is.
    """

    delta: str = _named("output", "output", "weights")
    stores: int = _count(0, least=0, flat="grad_stores")
    dp_stored: bool = _switch()


@dataclass(frozen=True, slots=True)
class Contract(_Validated):
    """One form of one preset. Format names; ``input`` and, where nothing else is said, None mean: the input dtype."""

    preset: str = _claim("fp32", _Text())
    label: str = _claim("plain", _Text())
    arithmetic: ArithmeticClaims = ArithmeticClaims()
    scores: ScoreClaims = ScoreClaims()
    weights: WeightClaims = WeightClaims()
    sums: SumClaims = SumClaims()
    output: OutputClaims = OutputClaims()
    rope: RopeClaims = RopeClaims()
    latent: LatentClaims = LatentClaims()
    gradient: GradientClaims = GradientClaims()

    def with_fields(self, **changes: object) -> Contract:
        """The contract with these fields, by their flat names; UnknownContract names a wrong field or value."""
        whole: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in FIELDS:
                raise UnknownContract(f"unknown contract field {name!r}; known: {', '.join(sorted(FIELDS))}")
            group, own = FIELDS[name]
            whole.setdefault(group, {})[own] = value
        top = whole.pop("", {})
        return replace(self, **top, **{g: replace(getattr(self, g), **own) for g, own in whole.items()})


def contract_of(preset: str, label: str = "plain", **claims: object) -> Contract:
    """A form of a preset from fields by their flat names."""
    return Contract(preset, label).with_fields(**claims)


def _places() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for claim in fields(Contract):
        if is_dataclass(claim.default):
            found |= {_flat(inner): (claim.name, inner.name) for inner in fields(claim.default)}
        else:
            found[claim.name] = ("", claim.name)
    return found


# What users write: flat name -> (group, field); the preset and the label stand in no group.
FIELDS = _places()


def resolved(name: str | None, input_format: Format) -> Format:
    """The format that a contract's field names: ``input`` and None are that of the inputs."""
    return input_format if name is None or name == "input" else format_named(name)
