"""The rules of scaled rotary frequencies once more, one pair at a time in mpmath: shares nothing with the oracle.

Written from the publications and from what transformers computes, at whatever precision mpmath works with; `parameters`
is the option ``scaling`` as a user gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpmath
from mpmath import mpf

Parameters = Mapping[str, Any]


def frequency(i: int, d: int, base: float, parameters: Parameters | None, length: int) -> Any:
    """Radians per position of pair i of d/2, for a sequence of ``length``."""
    wavelength = 2 * mpmath.pi * mpmath.power(mpf(base), mpf(2 * i) / d)
    kind = "default" if parameters is None else parameters["rope_type"]
    if parameters is None or kind == "default":
        return 2 * mpmath.pi / wavelength
    if kind == "linear":
        # Positions are interpolated: every wavelength grows by the factor.
        return 2 * mpmath.pi / (wavelength * mpf(parameters["factor"]))
    if kind == "dynamic":
        trained, s = parameters["max_position_embeddings"], mpf(parameters["factor"])
        if length <= trained:
            return 2 * mpmath.pi / wavelength
        larger = mpf(base) * (s * length / trained - s + 1) ** (mpf(d) / (d - 2))
        return mpmath.exp(-mpmath.log(larger) * 2 * i / d)
    if kind == "longrope":
        name = "short_factor" if length <= parameters["original_max_position_embeddings"] else "long_factor"
        return 2 * mpmath.pi / wavelength / mpf(parameters[name][i])
    share = _interpolated(i, d, base, parameters, wavelength)
    s = _factor(parameters)
    return 2 * mpmath.pi / wavelength * (share / s + 1 - share)


def _factor(parameters: Parameters) -> Any:
    if parameters.get("factor") is None:
        return mpf(parameters["max_position_embeddings"]) / parameters["original_max_position_embeddings"]
    return mpf(parameters["factor"])


def _interpolated(i: int, d: int, base: float, parameters: Parameters, wavelength: Any) -> Any:
    """How much of pair i is interpolated: 0 for fast ones, 1 for slow ones."""
    trained = parameters["original_max_position_embeddings"]
    if parameters["rope_type"] == "llama3":
        few, many = mpf(parameters["low_freq_factor"]), mpf(parameters["high_freq_factor"])
    else:
        few, many = mpf(parameters.get("beta_slow") or 1), mpf(parameters.get("beta_fast") or 32)
    if parameters["rope_type"] == "llama3" or parameters.get("ramp") == "rotations":
        rotations = trained / wavelength
        if rotations >= many:
            return mpf(0)
        return mpf(1) if rotations <= few else (many - rotations) / (many - few)
    # Pair numbers whose wavelength goes `many` and `few` times into the trained length.
    first = d * mpmath.log(trained / (2 * mpmath.pi * many)) / (2 * mpmath.log(base))
    last = d * mpmath.log(trained / (2 * mpmath.pi * few)) / (2 * mpmath.log(base))
    if parameters.get("truncate", True):
        first, last = mpmath.floor(first), mpmath.ceil(last)
    if first < 0:
        first = mpf(0)
    if last > d - 1:
        last = mpf(d - 1)
    if first == last:
        last += mpf(1) / 1000
    if i <= first:
        return mpf(0)
    return mpf(1) if i >= last else (i - first) / (last - first)


def size(parameters: Parameters | None) -> Any:
    """What multiplies cos and sin."""
    if parameters is None or parameters["rope_type"] not in ("yarn", "longrope"):
        return mpf(1)
    if parameters.get("attention_factor") is not None:
        return mpf(parameters["attention_factor"])
    s = _factor(parameters)
    growth = mpmath.log(s) if s > 1 else mpf(0)
    if parameters["rope_type"] == "longrope":
        return mpmath.sqrt(1 + growth / mpmath.log(parameters["original_max_position_embeddings"]))
    top, bottom = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if parameters.get("mscale_rule") == "deepseek":
        top, bottom = 1 if top is None else top, 0 if bottom is None else bottom
    elif not top or not bottom:
        top, bottom = 1, 0
    return (1 + mpf(top) * growth / 10) / (1 + mpf(bottom) * growth / 10)


def axis(i: int, parameters: Parameters | None) -> int:
    """Which of three positions turns pair i."""
    sections = None if parameters is None else parameters.get("mrope_section")
    if parameters is None or sections is None:
        return 0
    if parameters.get("mrope_interleaved"):
        return i % 3 if i < 3 * sections[i % 3] else 0
    for place, count in enumerate(sections):
        if i < count:
            return place
        i -= count
    raise ValueError(f"sections {sections} do not reach the pair")


def by_length(parameters: Parameters | None) -> bool:
    return parameters is not None and parameters["rope_type"] in ("dynamic", "longrope")


def turned(
    x: list[Any],
    positions: list[int],
    d: int,
    base: float,
    parameters: Parameters | None,
    length: int,
    *,
    layout: str,
    back: bool = False,
) -> list[Any]:
    """One row x at its position (or three, by axis), entry by entry; ``back``: the transposed map."""  # fmt: skip
    out, a = list(x), size(parameters)
    for i in range(d // 2):
        one, two = (i, i + d // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = positions[axis(i, parameters)] * frequency(i, d, base, parameters, length)
        cos, sin = a * mpmath.cos(angle), a * mpmath.sin(angle) * (-1 if back else 1)
        out[one], out[two] = x[one] * cos - x[two] * sin, x[one] * sin + x[two] * cos
    return out
