"""Floating-point formats: exact values, neighbours, spacing and rounding.

Every format is binary with gradual underflow: ``precision`` significant bits (the hidden one included),
exponents ``emin .. emax`` of normal numbers. All values of every format here are exact float64 numbers, so
float64 arrays carry them. e4m3 is the variant without infinities (E4M3FN): its top exponent holds numbers to 448
and one NaN of each sign, and what rounds beyond 448 is NaN, or 448 where the conversion saturates: which of the two
is the caller's choice, because hardware and libraries differ. All others are IEEE-754 in this respect.

Source: IEEE 754-2019 section 3.3; bfloat16 as in the x86 and Arm manuals; tf32 as in NVIDIA's A100
whitepaper (8 exponent bits, 10 stored fraction bits); e4m3 and e5m2: Micikevicius et al. 2022 (arXiv 2209.05433),
table 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64Array = NDArray[np.float64]
FloatArray = NDArray[np.floating]
StoredArray = NDArray[np.generic]
"""An array in any dtype of storage: floats of one of these formats, integers, truth values."""


@dataclass(frozen=True, slots=True)
class Format:
    """One binary format. ``dtype`` is the numpy storage type; tf32 has none and is stored as float32.

    infinite: whether there are infinities; without them the largest significand of the top exponent is NaN.

    unit_roundoff: largest relative error of one rounding to nearest, 2^-precision. omega: largest absolute error of one
    rounding in the subnormal range. overflow_threshold: the magnitude from which rounding to nearest is not finite (inf
    for fp64); without infinities the threshold itself, a tie, still rounds to the largest number, whose last bit is
    even.
    """

    name: str
    precision: int
    emin: int
    emax: int
    dtype: Any
    infinite: bool = True

    unit_roundoff: float = field(init=False, repr=False, compare=False)
    smallest_normal: float = field(init=False, repr=False, compare=False)
    smallest_subnormal: float = field(init=False, repr=False, compare=False)
    omega: float = field(init=False, repr=False, compare=False)
    max_finite: float = field(init=False, repr=False, compare=False)
    overflow_threshold: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lost = 1 if self.infinite else 2
        subnormal = 2.0 ** (self.emin - self.precision + 1)
        largest = (2.0 - lost * 2.0 ** (1 - self.precision)) * 2.0**self.emax
        facts = {
            "unit_roundoff": 2.0**-self.precision,
            "smallest_normal": 2.0**self.emin,
            "smallest_subnormal": subnormal,
            # For fp64 half of it is no float64 number: an upper bound.
            "omega": max(subnormal / 2, 2.0**-1074),
            "max_finite": largest,
            "overflow_threshold": float("inf")
            if self.name == "fp64"
            else largest + 2.0 ** (self.emax - self.precision),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def round(self, x: ArrayLike, *, saturate: bool = False) -> Float64Array:
        """Round float64 values to this format, to nearest, ties to even; result as float64.

        Beyond the largest number: infinity (NaN in a format without), or with ``saturate`` that number, which
        infinities give too.
        """
        values = np.asarray(x, dtype=np.float64)
        if saturate:
            values = np.clip(values, -self.max_finite, self.max_finite)
        if self.name == "fp64":
            return values.copy()
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.dtype is np.float32 and self.precision == 24:
                return values.astype(np.float32).astype(np.float64)
            return _round_by_quantum(values, self)

    def store(self, x: ArrayLike, *, saturate: bool = False) -> StoredArray:
        """Round float64 values to this format and return them in the storage dtype."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return self.round(x, saturate=saturate).astype(self.dtype)

    def ulp(self, x: ArrayLike) -> Float64Array:
        """Spacing of this format at |x|, float64; the subnormal spacing below the normal range.

        At and above ``max_finite`` the spacing of the top binade; nan for nan.
        """
        magnitude = np.asarray(np.abs(np.asarray(x, dtype=np.float64)))
        # The power of two at or below: the number without its fraction.
        binade = (np.minimum(magnitude, self.max_finite).view(np.int64) & _EXPONENT_BITS).view(np.float64)
        spacing = np.maximum(binade, self.smallest_normal) * 2.0 ** (1 - self.precision)
        return np.asarray(np.where(np.isnan(magnitude), np.nan, spacing), dtype=np.float64)

    def next_up(self, x: ArrayLike) -> Float64Array:
        """The least value of the format above x, for x in the format; inf stays inf, -inf gives -max.

        Above the largest number stands inf, also where the format itself has none.
        """
        values = np.asarray(x, dtype=np.float64)
        magnitude = np.abs(values)
        down = magnitude - self.ulp(magnitude) * np.where(self.is_power_above_min(magnitude), 0.5, 1.0)
        with np.errstate(over="ignore"):
            # Above the largest fp64 number the sum is infinite, which is the answer.
            result = np.where(values >= 0, magnitude + self.ulp(magnitude), -down)
        result = np.where(values >= self.max_finite, np.inf, result)
        result = np.where(values == -np.inf, -self.max_finite, result)
        return np.where(np.isnan(values), np.nan, result)

    def next_down(self, x: ArrayLike) -> Float64Array:
        """The greatest value of the format below x, for x in the format."""
        return -self.next_up(-np.asarray(x, dtype=np.float64))

    def is_power_above_min(self, magnitude: Float64Array) -> NDArray[np.bool_]:
        """Where the spacing below is half of that above."""
        fraction, _ = np.frexp(magnitude)
        return np.asarray((fraction == 0.5) & (magnitude > self.smallest_normal))


def _round_by_quantum(values: Float64Array, fmt: Format) -> Float64Array:
    # Added to 3/2 of a power of two whose last place is the wanted spacing, a number is rounded to that spacing, and
    # the difference is exact: only the wanted rounding happens. numpy's own float64 -> float16 and ml_dtypes' casts are
    # not relied upon (some go through float32).
    within = np.abs(values) <= 2 * fmt.max_finite
    whole = bool(within.all())
    safe = values if whole else np.where(within, values, 0.0)
    anchor = np.asarray((safe.view(np.int64) & _EXPONENT_BITS).view(np.float64))
    np.maximum(anchor, fmt.smallest_normal, out=anchor)
    anchor *= 1.5 * 2.0 ** (53 - fmt.precision)
    rounded = np.asarray(safe + anchor)
    rounded -= anchor
    np.copysign(rounded, safe, out=rounded)
    if whole and (not rounded.size or max(rounded.max(), -rounded.min()) <= fmt.max_finite):
        return rounded
    beyond = np.copysign(np.inf, values) if fmt.infinite else np.full(values.shape, np.nan)
    rounded = np.where(within & (np.abs(rounded) <= fmt.max_finite), rounded, beyond)
    return np.where(np.isnan(values), values if fmt.infinite else np.nan, rounded)


_EXPONENT_BITS = np.int64(0x7FF0000000000000)

FP64 = Format("fp64", 53, -1022, 1023, np.float64)
FP32 = Format("fp32", 24, -126, 127, np.float32)
TF32 = Format("tf32", 11, -126, 127, np.float32)
FP16 = Format("fp16", 11, -14, 15, np.float16)
BF16 = Format("bf16", 8, -126, 127, ml_dtypes.bfloat16)
E4M3 = Format("e4m3", 4, -6, 8, ml_dtypes.float8_e4m3fn, infinite=False)
E5M2 = Format("e5m2", 3, -14, 15, ml_dtypes.float8_e5m2)

FORMATS: dict[str, Format] = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E4M3, E5M2)}
STORAGE = ("fp64", "fp32", "fp16", "bf16")
"""Formats of the inputs and outputs of targets of every op."""
EIGHT_BITS = ("e4m3", "e5m2")
"""Formats of the inputs of attention beside those."""
INPUTS = (*STORAGE, *EIGHT_BITS)
"""Formats of the inputs of attention beside those."""
_BY_DTYPE = {np.dtype(FORMATS[name].dtype): FORMATS[name] for name in INPUTS}


def beside(inputs: str) -> Format:
    """The format of additive masks and sinks beside inputs of this one: the same; bf16 beside eight bits."""
    return BF16 if inputs in EIGHT_BITS else format_named(inputs)


def format_named(name: str) -> Format:
    """The format called ``name``; ValueError lists the known ones."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(array: StoredArray) -> Format:
    """The format of a numpy array's dtype; ValueError for other dtypes."""
    found = _BY_DTYPE.get(array.dtype)
    if found is None:
        raise ValueError(f"no floating-point format for dtype {array.dtype}; known: {', '.join(INPUTS)}")
    return found
