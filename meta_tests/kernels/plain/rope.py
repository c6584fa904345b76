"""The rotary embedding, turn by turn."""

import math
from typing import Any

import mpmath
import numpy as np

from meta_tests.kernels.plain.exact import Array, Exact, wide
from meta_tests.witnesses import rope as rope_witness


def turn(x: Array, cos: Array, sin: Array, angle: Array, layout: str) -> Exact:
    """`angle`: the roundings of the angle, in radians."""
    half = cos.shape[-1]
    y, stored, computed = x.copy(), np.zeros_like(x), np.zeros_like(x)
    for i in range(half):
        a, b = (i, i + half) if layout == "half" else (2 * i, 2 * i + 1)
        c, s = cos[..., i], sin[..., i]
        y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
        computed[..., a] = computed[..., b] = (np.abs(x[..., a]) + np.abs(x[..., b])) * (4 + angle[..., i])
        for entry in (a, b):
            stored[..., entry] = np.abs(y[..., entry])
    return Exact(y, stored, computed)


def rope(
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: Any = None,
    sign: float = 1.0,
) -> list[Exact]:
    """`sign` of sin: -1 for the gradient."""
    x = wide(x)
    half = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    places = positions.numpy().astype(np.float64)
    if scaling is None or "mrope_section" not in scaling:
        places = np.stack([places] * 3)
    places = places[:, :, None] if places.ndim == 3 else places
    length = int(places.max()) + 1
    with mpmath.workprec(100):
        theta = [float(rope_witness.frequency(i, 2 * half, base, scaling, length)) for i in range(half)]
        size = float(rope_witness.size(scaling))
    shape = (*x.shape[:-1], half)
    turned = [places[rope_witness.axis(i, scaling)] * theta[i] for i in range(half)]
    angle = np.broadcast_to(np.stack(turned, -1), shape)
    # Blended frequencies magnify the rounding of what they are blended by.
    blended = 40 if scaling is not None and scaling["rope_type"] in ("yarn", "llama3") else 10 if scaling else 0
    roundings = np.abs(angle) * [2.0 + blended + 4 * i / half * math.log(base) for i in range(half)]
    made = turn(x, size * np.cos(angle), sign * size * np.sin(angle), roundings, layout)
    return [made._replace(computed=made.computed * max(size, 1.0) + 16 * made.stored * (size != 1))]


def rope_backward(dy: Any, positions: Any, **options: Any) -> list[Exact]:
    return rope(dy, positions, **options, sign=-1.0)


def rope_apply(x: Any, cos: Any, sin: Any, *, layout: str = "half") -> list[Exact]:
    x = wide(x)
    shape = (*x.shape[:-1], cos.shape[-1])
    tables = np.broadcast_to(wide(cos), shape), np.broadcast_to(wide(sin), shape)
    return [turn(x, *tables, np.zeros(shape), layout)]
