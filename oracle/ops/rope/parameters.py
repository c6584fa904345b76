"""The option ``scaling`` of rope: a dict with the keys of transformers' ``rope_parameters``, checked and read.

| rope_type | required | optional (default) |
|---|---|---|
| default | | |
| linear | factor | |
| dynamic | factor, max_position_embeddings | seq_len |
| yarn | factor, original_max_position_embeddings | beta_fast (32), beta_slow (1), truncate (True), ramp, |
| | | attention_factor, mscale, mscale_all_dim, mscale_rule, max_position_embeddings |
| llama3 | factor, original_max_position_embeddings, low_freq_factor, high_freq_factor | |
| longrope | short_factor, long_factor, original_max_position_embeddings | factor, attention_factor, seq_len, |
| | | max_position_embeddings |

Every type also takes mrope_section and mrope_interleaved, and rope_theta and partial_rotary_factor, which must agree
with the options base and rotary_dim. yarn's and longrope's factor may be left out where max_position_embeddings is
given: it is then the quotient of the two lengths; a stated factor has precedence, as in transformers.

Where the publication and transformers, or two publications, differ:

- ramp (yarn): ``dimension`` (default; transformers and the authors' code: linear in the number of the pair), or
  ``rotations`` (the paper's equation 18: linear in the rotations within the original length).
- mscale_rule (yarn): ``transformers`` (default: mscale and mscale_all_dim count only if both are given and not 0),
  or ``deepseek`` (DeepSeek-V2's code: mscale is 1 and mscale_all_dim 0 where it is not given).
- seq_len (dynamic, longrope): a number; ``call`` (default, transformers: one more than the largest position of
  the whole call); ``sequence`` (each batch entry by its own positions). transformers' modules also remember longer
  calls before this one (dynamic, until one is shorter than the original length): state, and no part of the formula.
- dynamic: factor 1 is the rule of the YaRN paper, another factor the one of the first implementations and of
  transformers.
- attention_factor has precedence over mscale and mscale_all_dim, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any, TypedDict

from oracle.ops.rope.scaling import PLAIN, Magnitude, Scaling, axes, has_ramp

_LENGTH = "original_max_position_embeddings"
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", _LENGTH),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", _LENGTH),
}
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": ("seq_len",),
    "yarn": (
        "max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
        "ramp", "mscale_rule",
    ),
    "llama3": (),
    "longrope": ("max_position_embeddings", "factor", "attention_factor", "seq_len"),
}  # fmt: skip
COMMON = ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
KINDS = tuple(REQUIRED)
RAMPS = ("dimension", "rotations")
MSCALE_RULES = ("transformers", "deepseek")
SEQ_LENS = ("call", "sequence")


class RopeParameters(TypedDict, total=False):
    """Valid parameters, as kernels read them; which of them a rope_type needs and knows: `REQUIRED`, `OPTIONAL`."""

    rope_type: str
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: Sequence[int]
    mrope_interleaved: bool
    factor: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    seq_len: int | str
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    mscale: float
    mscale_all_dim: float
    ramp: str
    mscale_rule: str
    low_freq_factor: float
    high_freq_factor: float
    short_factor: Sequence[float]
    long_factor: Sequence[float]


def read_scaling(given: object, *, base: float, dim: int, rotary_dim: int) -> Scaling:
    """The parameters in ``given`` (None: no scaling). ValueError, naming key and value, for what does not fit."""
    if given is None:
        return PLAIN
    if not isinstance(given, Mapping) or "rope_type" not in given:
        raise ValueError(f"scaling must be None or a dict with 'rope_type', got {given!r}")
    kind = given["rope_type"]
    if kind not in KINDS:
        raise ValueError(f"unknown rope_type {kind!r} in scaling; known: {', '.join(KINDS)}")
    p = _Parameters(kind, given)
    p.check_keys()
    p.agrees("rope_theta", base, "base")
    if p.has("partial_rotary_factor"):
        rotated = int(dim * float(p.positive("partial_rotary_factor")))
        if rotated != rotary_dim:
            raise p.wrong(
                "partial_rotary_factor", f"rotates {rotated} of {dim} entries, but rotary_dim is {rotary_dim}"
            )
    sections, interleaved = _sections(p, rotary_dim // 2)
    common: dict[str, Any] = {"kind": kind, "sections": sections, "interleaved": interleaved}
    match kind:
        case "default":
            return Scaling(**common)
        case "linear":
            return Scaling(factor=p.positive("factor"), **common)
        case "dynamic":
            return _dynamic(p, common, rotary_dim)
        case "yarn":
            return _yarn(p, common, base, rotary_dim)
        case "llama3":
            return _llama3(p, common)
    return _longrope(p, common, rotary_dim)


class _Parameters:
    """One dict of parameters, and the errors that its readers raise."""

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        self.kind, self.given = kind, given

    def wrong(self, key: str, why: str) -> ValueError:
        return ValueError(f"scaling[{key!r}] = {self.given.get(key)!r} {why}")

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def check_keys(self) -> None:
        known = (*COMMON, *REQUIRED[self.kind], *OPTIONAL[self.kind])
        for key in self.given:
            if key not in known:
                raise ValueError(
                    f"unknown key {key!r} (value {self.given[key]!r}) in scaling of type {self.kind}; "
                    f"known: {', '.join(known)}"
                )
        for key in REQUIRED[self.kind]:
            implied = key == "factor" and self.kind == "yarn" and self.has("max_position_embeddings")
            if not self.has(key) and not implied:
                raise ValueError(f"scaling of type {self.kind} needs {key!r}, got {dict(self.given)!r}")

    def agrees(self, key: str, value: float, option: str) -> None:
        if self.has(key) and float(self.positive(key)) != value:
            raise self.wrong(key, f"contradicts the option {option} = {value!r}")

    def positive(self, key: str) -> Fraction:
        value = self.given[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise self.wrong(key, "must be a positive number")
        return Fraction(value)

    def whole(self, key: str, *, least: int = 1) -> int:
        value = self.given[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be an integer of at least {least}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.given.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "must be True or False")
        return default if value is None else value

    def choice(self, key: str, known: Sequence[str]) -> str:
        value = self.given.get(key, known[0])
        if value not in known:
            raise self.wrong(key, f"is unknown; known: {', '.join(known)}")
        return str(value)

    def factors(self, key: str, pairs: int) -> tuple[Fraction, ...]:
        value = self.given[key]
        if not isinstance(value, list | tuple) or len(value) != pairs:
            raise self.wrong(key, f"must be a list of rotary_dim/2 = {pairs} numbers")
        for x in value:
            if isinstance(x, bool) or not isinstance(x, int | float) or not isfinite(x) or x <= 0:
                raise self.wrong(key, f"must hold positive numbers, not {x!r}")
        return tuple(Fraction(x) for x in value)

    def ratio(self, length: int) -> Fraction:
        """The stated factor, or that of the two lengths."""
        if self.has("factor"):
            return self.positive("factor")
        return Fraction(self.whole("max_position_embeddings"), length)

    def seq_len(self) -> int | str:
        value = self.given.get("seq_len", SEQ_LENS[0])
        return self.choice("seq_len", SEQ_LENS) if isinstance(value, str) else self.whole("seq_len")


def _sections(p: _Parameters, pairs: int) -> tuple[tuple[int, int, int] | None, bool]:
    interleaved = p.flag("mrope_interleaved", default=False)
    if not p.has("mrope_section"):
        if interleaved:
            raise p.wrong("mrope_interleaved", "needs 'mrope_section'")
        return None, False
    given = p.given["mrope_section"]
    fits = isinstance(given, list | tuple) and len(given) == 3
    if not fits or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in given):
        raise p.wrong("mrope_section", "must be three numbers of pairs: time, height, width")
    t, h, w = (int(n) for n in given)
    if t + h + w != pairs:
        raise p.wrong("mrope_section", f"sums up to {t + h + w}, but rotary_dim/2 is {pairs}")
    axis = axes(Scaling(sections=(t, h, w), interleaved=interleaved), pairs)
    found = [int((axis == place).sum()) for place in range(3)]
    if found != [t, h, w]:
        raise p.wrong("mrope_section", f"cannot be interleaved in {pairs} pairs: they would be {found}")
    return (t, h, w), interleaved


def _dynamic(p: _Parameters, common: dict[str, Any], rotary_dim: int) -> Scaling:
    if rotary_dim < 4:
        raise ValueError(f"scaling of type dynamic raises to the power d/(d - 2): rotary_dim {rotary_dim} is too small")
    factor = p.positive("factor")
    if factor < 1:
        raise p.wrong("factor", "must be at least 1")
    return Scaling(factor=factor, length=p.whole("max_position_embeddings"), seq_len=p.seq_len(), **common)


def _yarn(p: _Parameters, common: dict[str, Any], base: float, rotary_dim: int) -> Scaling:
    if base <= 1:
        raise ValueError(f"scaling of type yarn needs a base above 1, got {base}")
    length = p.whole(_LENGTH)
    # A value of None or 0 means the default, as in transformers.
    fast = p.positive("beta_fast") if p.given.get("beta_fast") else Fraction(32)
    slow = p.positive("beta_slow") if p.given.get("beta_slow") else Fraction(1)
    if fast <= slow:
        raise p.wrong("beta_fast", f"must be larger than beta_slow = {float(slow):g}")
    scaling = Scaling(
        factor=p.ratio(length), length=length, slow=slow, fast=fast, ramp=p.choice("ramp", RAMPS),
        truncate=p.flag("truncate", default=True), magnitude=_yarn_magnitude(p),
        all_dim=p.positive("mscale_all_dim") if p.given.get("mscale_all_dim") else Fraction(0), **common,
    )  # fmt: skip
    if scaling.ramp == "dimension" and not has_ramp(scaling, base, rotary_dim):
        raise p.wrong(_LENGTH, f"leaves no ramp among {rotary_dim // 2} pairs at base {base:g}")
    return scaling


def _yarn_magnitude(p: _Parameters) -> Magnitude:
    if p.has("attention_factor"):
        return Magnitude("given", value=p.positive("attention_factor"))
    for key in ("mscale", "mscale_all_dim"):
        if p.given.get(key):
            p.positive(key)
    one, all_dim = (Fraction(p.given.get(key) or 0) for key in ("mscale", "mscale_all_dim"))
    if p.choice("mscale_rule", MSCALE_RULES) == "deepseek":
        return Magnitude("yarn", numerator=one if p.has("mscale") else Fraction(1), denominator=all_dim)
    return Magnitude("yarn", numerator=one, denominator=all_dim) if one and all_dim else Magnitude("yarn")


def _llama3(p: _Parameters, common: dict[str, Any]) -> Scaling:
    low, high = p.positive("low_freq_factor"), p.positive("high_freq_factor")
    if low >= high:
        raise p.wrong("low_freq_factor", f"must be below high_freq_factor = {float(high):g}")
    return Scaling(factor=p.positive("factor"), length=p.whole(_LENGTH), slow=low, fast=high, **common)


def _longrope(p: _Parameters, common: dict[str, Any], rotary_dim: int) -> Scaling:
    length = p.whole(_LENGTH)
    if not p.has("factor") and not p.has("max_position_embeddings") and not p.has("attention_factor"):
        raise ValueError(
            "scaling of type longrope needs 'factor', 'max_position_embeddings' or 'attention_factor', "
            f"got {dict(p.given)!r}"
        )
    stated = p.has("attention_factor")
    factor = p.ratio(length) if p.has("factor") or p.has("max_position_embeddings") else Fraction(1)
    if not stated and factor > 1 and length < 2:
        raise p.wrong(_LENGTH, "has no logarithm to divide by")
    size = Magnitude("given", value=p.positive("attention_factor")) if stated else Magnitude("longrope")
    return Scaling(
        factor=factor, length=length, short=p.factors("short_factor", rotary_dim // 2),
        long=p.factors("long_factor", rotary_dim // 2), seq_len=p.seq_len(), magnitude=size, **common,
    )  # fmt: skip
