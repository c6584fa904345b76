"""Honest rotary kernels and the inputs they are tried on: what a bound must never reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.formats import FORMATS, Format

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Kernel:
    """How a kernel makes frequencies and rotates.

    Formats by stage, ``input`` for that of x. ``worst``: the frequency's function and the trigonometric ones
    err as much as the contract allows them.
    """

    preset: str
    frequency: str = "pow"
    angle: str = "fp32"
    table: str = "fp32"
    turn: str = "fp32"
    fused: bool = False
    worst: bool = False


KERNELS = (
    *(Kernel("fp32_angle", frequency) for frequency in ("pow", "exp", "exp2", "double")),
    Kernel("fp32_angle", "exp2", fused=True),
    Kernel("fp32_angle", "exp", worst=True),
    Kernel("fp32_angle", "pow", worst=True, fused=True),
    Kernel("fp64_angle", "pow", angle="fp64"),
    Kernel("fp64_angle", "exp", angle="fp64", fused=True),
    Kernel("fp64_angle", "reduced", angle="fp64"),
    Kernel("input_table", "pow", table="input"),
    Kernel("input_table", "exp2", table="input", worst=True),
    Kernel("input_all", "double", angle="input", table="input", turn="input"),
    Kernel("input_all", "pow", angle="input", table="input", turn="input"),
    # What transformers did for years: fp32 angles, the table cast to the input's dtype, the rotation call by
    # call.
    Kernel("input_all", "pow", table="input", turn="input"),
)
DOUBLE = Kernel("fp64", "pow", angle="fp64", table="fp64", turn="fp64")


def frequencies(kernel: Kernel, base: float, dim: int, fmt: Format, rng: np.random.Generator) -> Float64:
    """base^(-2i/d), each operation rounded to ``fmt``."""
    r = fmt.round
    t = r(np.arange(0, dim, 2) / dim)
    noise = rng.choice([-1.0, 1.0], size=len(t)) * (2.9 * fmt.unit_roundoff if kernel.worst else 0.0)
    noise[0] = 0.0
    if kernel.frequency in ("double", "reduced"):
        return r(float(base) ** (-np.arange(0, dim, 2) / dim))
    if kernel.frequency == "exp":
        return r(np.exp(-r(t * r(np.log(base)))) * (1 + noise))
    if kernel.frequency == "exp2":
        return r(np.exp2(-r(t * r(np.log2(base)))) * (1 + noise))
    return r(1 / r(r(float(base)) ** t * (1 + noise)))


def run_kernel(
    kernel: Kernel,
    x: NDArray[Any],
    positions: NDArray[np.int64],
    base: float,
    dim: int,
    fmt: Format,
    seed: int,
    *,
    theta: Float64 | None = None,
    size: float = 1.0,
    back: bool = False,
) -> NDArray[Any]:
    """x [S, D] of ``fmt``, layout half, the first ``dim`` entries rotated (``back``: by the negated angle).

    ``theta``, ``size``: frequencies and magnitude, if they are not made here; positions [S] or [S, d/2].
    """
    rng = np.random.default_rng(seed)
    compute = FORMATS["fp64" if kernel.preset == "fp64" else "fp32"]
    angle, table, turn = (
        fmt if name == "input" else FORMATS[name] for name in (kernel.angle, kernel.table, kernel.turn)
    )
    if theta is None:
        theta = frequencies(kernel, base, dim, angle, rng)
    places = positions[:, None] if positions.ndim == 1 else positions
    turns = angle.round(angle.round(places.astype(np.float64)) * theta)
    if kernel.frequency == "reduced":
        turns = compute.round(np.remainder(turns + np.pi, 2 * np.pi) - np.pi)
    slack = 3 * compute.unit_roundoff if kernel.worst else 0.0
    noisy = (f(turns) + slack * rng.choice([-1, 1], size=turns.shape) for f in (np.cos, np.sin))
    parts = (np.clip(compute.round(part), -1, 1) for part in noisy)
    cos, sin = (table.round(part if size == 1 else compute.round(part * size)) for part in parts)
    sin = -sin if back else sin
    first, second = (x[:, part].astype(np.float64) for part in (slice(0, dim // 2), slice(dim // 2, dim)))
    r = turn.round
    # The products are exact in float64 for operands of up to 24 bits, so `fused` rounds once.
    if kernel.fused:
        left, right = r(first * cos - r(second * sin)), r(first * sin + r(second * cos))
    else:
        left, right = r(r(first * cos) - r(second * sin)), r(r(first * sin) + r(second * cos))
    out = x.copy()
    out[:, :dim] = fmt.store(np.concatenate([left, right], axis=1))
    return out


INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, int], Format], Float64]] = {
    "normal": lambda rng, shape, f: rng.standard_normal(shape),
    "outlier": lambda rng, shape, f: rng.standard_normal(shape) * np.where(rng.uniform(size=shape) < 0.1, 50, 1e-3),
    "one-sided pairs": lambda rng, shape, f: rng.standard_normal(shape) * (np.arange(shape[1]) < shape[1] // 2),
    "subnormal": lambda rng, shape, f: rng.integers(-30, 30, shape) * f.smallest_subnormal,
    "tiny": lambda rng, shape, f: rng.standard_normal(shape) * f.smallest_normal * 4,
    "near overflow": lambda rng, shape, f: rng.uniform(-1, 1, shape) * f.max_finite,
    "powers of two": lambda rng, shape, f: 2.0 ** rng.integers(-8, 8, shape),
}


def draw_positions(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """0, 1, and numbers spread over the orders of magnitude up to 2^24 and a little beyond."""
    spread = np.floor(2.0 ** rng.uniform(0, 25, max(count - 2, 0))).astype(np.int64)
    return np.concatenate([np.array([0, 1], dtype=np.int64), spread])[:count]
