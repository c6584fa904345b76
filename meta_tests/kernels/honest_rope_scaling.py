"""Honest ways to make scaled rotary frequencies and magnitudes in low precision, and the parameters they are tried on.

Each way follows one kind of published code, every operation rounded to the format of the frequencies:

- ``host``: parameters and borders of ramps in float64, as Python computes them, the rest in the format (transformers).
- ``narrow``: everything in the format, logarithms too (C++ code with floats).
- ``exponent``: exp(-t ln base) for the frequencies, and a reciprocal of the factor.
- ``wide``: all in float64, rounded once.
``worst``: every transcendental function errs as much as the contract allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, Format
from oracle.ops.rope.scaling import Scaling, list_of

Float64 = NDArray[np.float64]
WAYS = ("host", "narrow", "exponent", "wide")


@dataclass
class Maker:
    """Arithmetic of one kernel: ``r`` rounds what the kernel stores, ``h`` what the host keeps of its parameters."""

    fmt: Format
    way: str
    rng: np.random.Generator
    worst: bool = False
    u: float = field(init=False)

    def __post_init__(self) -> None:
        self.u = self.fmt.unit_roundoff

    def r(self, x: Any) -> Any:
        return self.fmt.round(np.asarray(x, dtype=np.float64))

    def h(self, x: Any) -> Any:
        return self.r(x) if self.way in ("narrow", "exponent") else np.asarray(x, dtype=np.float64)

    def noise(self, x: Any, units: float) -> Any:
        """x with an error of that many units, of either sign, where the worst is asked for."""
        x = np.asarray(x, dtype=np.float64)
        return x * (1 + self.rng.choice([-1.0, 1.0], size=x.shape) * units * self.u) if self.worst else x

    def power(self, base: float, t: Float64) -> Float64:
        """base^t, exactly 1 at 0."""
        found = self.noise(self.r(base) ** self.r(t), 2.9)
        return np.asarray(self.r(np.where(t == 0, 1.0, found)))

    def log(self, x: Any, *, units: float = 1.9) -> Any:
        return self.h(self.noise(np.log(x), units) if self.way in ("narrow", "exponent") else np.log(x))

    def unscaled(self, base: float, dim: int) -> Float64:
        t = np.arange(0, dim, 2) / dim
        if self.way == "exponent":
            return np.asarray(
                self.r(np.where(t == 0, 1.0, self.noise(np.exp(-self.r(self.r(t) * self.log(base, units=0.9))), 2.9)))
            )
        return np.asarray(self.r(1 / self.power(base, t)))

    def divided(self, x: Any, s: Any) -> Float64:
        if self.way == "exponent":
            return np.asarray(self.r(x * self.r(1 / self.r(s))))
        return np.asarray(self.r(x / self.r(s)))


def frequencies(scaling: Scaling, base: float, dim: int, length: int, maker: Maker) -> Float64:
    """theta [d/2] as this kernel makes them."""
    if maker.way == "wide":
        return np.asarray(maker.fmt.round(frequencies(scaling, base, dim, length, _double(maker))))
    r, s = maker.r, float(scaling.factor)
    match scaling.kind:
        case "dynamic":
            return _dynamic(scaling, base, dim, length, maker)
        case "linear":
            return maker.divided(maker.unscaled(base, dim), s)
        case "longrope":
            factors = np.array([float(x) for x in list_of(scaling, length)])
            if maker.way == "exponent":
                return maker.divided(maker.unscaled(base, dim), factors)
            return np.asarray(r(1 / r(r(factors) * maker.power(base, np.arange(0, dim, 2) / dim))))
        case "llama3":
            theta = maker.unscaled(base, dim)
            return _by_rotations(scaling, theta, maker)
        case "yarn":
            if scaling.ramp == "rotations":
                return _by_rotations(scaling, maker.unscaled(base, dim), maker)
            return _by_dimension(scaling, base, dim, maker)
    return maker.unscaled(base, dim)


def _double(maker: Maker) -> Maker:
    return Maker(FORMATS["fp64"], "host", maker.rng)


def _dynamic(scaling: Scaling, base: float, dim: int, length: int, maker: Maker) -> Float64:
    h, s = maker.h, float(scaling.factor)
    longest = max(length, scaling.length)
    ratio = h(h(h(h(s) * h(longest)) / h(scaling.length)) - h(h(s) - 1))
    grown = h(h(base) * h(maker.noise(ratio ** h(dim / (dim - 2)), 2.9 if maker.way != "host" else 0)))
    if maker.way == "host":
        # The length is a tensor in transformers, so the base becomes one of float32.
        grown = maker.r(grown)
    return maker.unscaled(float(grown), dim)


def _by_rotations(scaling: Scaling, theta: Float64, maker: Maker) -> Float64:
    """As Llama's and transformers' code: by wavelengths, three branches."""
    r, h = maker.r, maker.h
    low, high, s, length = float(scaling.slow), float(scaling.fast), float(scaling.factor), float(scaling.length)
    wavelength = r(r(2 * pi) / theta)
    longest, shortest = h(length / h(low)), h(length / h(high))
    smooth = r(r(r(r(length) / wavelength) - r(low)) / r(h(h(high) - h(low))))
    slowed = maker.divided(theta, s)
    mixed = r(maker.divided(r(r(1 - smooth) * theta), s) + r(smooth * theta))
    found = np.where(wavelength > longest, slowed, theta)
    return np.asarray(np.where((wavelength >= shortest) & (wavelength <= longest), mixed, found))


def _by_dimension(scaling: Scaling, base: float, dim: int, maker: Maker) -> Float64:
    """As the authors' and transformers' code."""
    r, h, s = maker.r, maker.h, float(scaling.factor)

    def border(beta: float) -> float:
        turns = maker.log(h(h(scaling.length) / h(h(h(beta) * h(2)) * h(pi))))
        return float(h(h(h(dim) * turns) / h(h(2) * maker.log(base))))

    low, high = border(float(scaling.fast)), border(float(scaling.slow))
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    pairs = np.arange(dim // 2)
    ramp = np.clip(r(r(pairs - r(low)) / r(h(high - low))), 0, 1)
    kept = r(1 - ramp)
    if maker.way == "exponent":
        theta = maker.unscaled(base, dim)
        return np.asarray(r(r(maker.divided(theta, s) * ramp) + r(theta * kept)))
    powers = maker.power(base, np.arange(0, dim, 2) / dim)
    slowed, plain = r(1 / r(r(s) * powers)), r(1 / powers)
    return np.asarray(r(r(slowed * r(1 - kept)) + r(plain * kept)))


def magnitude(scaling: Scaling, maker: Maker) -> float:
    """A as this kernel makes it, in its format at last."""
    how, h, s = scaling.magnitude, maker.h, float(scaling.factor)

    def tempered(m: float) -> Any:
        return h(1 + h(h(h(0.1) * h(m)) * maker.log(h(s)))) if s > 1 and m else h(1.0)

    match how.rule:
        case "given":
            return float(maker.r(float(how.value)))
        case "yarn":
            return float(maker.r(h(tempered(float(how.numerator)) / tempered(float(how.denominator)))))
        case "longrope":
            if s <= 1:
                return 1.0
            quotient = h(maker.log(h(s)) / maker.log(h(scaling.length)))
            return float(maker.r(h(np.sqrt(h(1 + quotient)))))
    return 1.0


def draw_parameters(rng: np.random.Generator, kind: str, dim: int) -> dict[str, Any]:
    """Parameters of one kind: those of released models, and others."""
    length = int(rng.choice([64, 2048, 4096, 8192, 32768, int(rng.integers(40, 40000))]))
    factor = float(rng.choice([1.0, 2.0, 4.0, 8.0, 40.0, 128.0, rng.uniform(1, 100)]))
    known: dict[str, Any] = {"rope_type": kind, "factor": factor}
    match kind:
        case "dynamic":
            known["max_position_embeddings"] = length
        case "llama3":
            low = float(rng.choice([1.0, rng.uniform(0.2, 3)]))
            known |= {
                "low_freq_factor": low,
                "high_freq_factor": low * float(rng.choice([4.0, 1.05, rng.uniform(1.1, 30)])),
            }
        case "longrope":
            known |= {n: [float(x) for x in rng.uniform(1, 60, dim // 2)] for n in ("short_factor", "long_factor")}
        case "yarn":
            slow = float(rng.choice([1.0, rng.uniform(0.3, 4)]))
            known |= {"beta_slow": slow, "beta_fast": slow * float(rng.choice([32.0, rng.uniform(1.5, 60)]))}
            known |= {"truncate": bool(rng.choice([True, False])), "ramp": str(rng.choice(["dimension", "rotations"]))}
            if rng.uniform() < 0.4:
                known |= {"mscale": float(rng.uniform(0.2, 2)), "mscale_all_dim": float(rng.uniform(0.2, 2))}
            if rng.uniform() < 0.2:
                known["attention_factor"] = float(rng.uniform(0.5, 2))
    if kind in ("yarn", "llama3", "longrope"):
        known["original_max_position_embeddings"] = length
    return known
