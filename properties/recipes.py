"""Recipes: small, shrinkable descriptions of tensors, and the arrays they stand for.

A recipe is a distribution, a seed and a few planted features; the array follows from it and the shape alone, so that a failing case
shrinks by shrinking a handful of small integers, whatever the size of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.formats import Float64Array, Format

Generator = np.random.Generator


@dataclass(frozen=True, slots=True)
class Recipe:
    """``family`` names the distribution (`FAMILIES`), ``seed`` its draw, ``gain`` a factor on everything."""

    family: str = "normal"
    seed: int = 0
    gain: float = 1.0


def _normal(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return rng.standard_normal(shape)


def _outliers(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    # FlashAttention-3 (arXiv 2407.08608, section 4.3): N(0, 1) + N(0, 100) in 0.1% of the entries.
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)


def _massive(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 30.0, 1.0)


def _massive_channels(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    channels = np.where(rng.random(shape[-1]) < 0.05, 20.0, 1.0)
    return rng.standard_normal(shape) * channels


def _tiny(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return 1e-3 * rng.standard_normal(shape)


def _alternating(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    signs = np.where(np.arange(shape[-1]) % 2, -1.0, 1.0)
    return np.abs(rng.standard_normal(shape)) * signs


def _one_signed(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return -np.abs(rng.standard_normal(shape)) - 0.5


def _ones(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return np.ones(shape)


def _integers(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return rng.integers(-3, 4, shape).astype(np.float64)


def _one_hot(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    out = np.zeros(shape)
    hot = rng.integers(0, shape[-1], shape[:-1])
    np.put_along_axis(out, hot[..., None], 1.0, axis=-1)
    return out


def _zeros(rng: Generator, shape: tuple[int, ...]) -> Float64Array:
    return np.zeros(shape)


FAMILIES: dict[str, Callable[[Generator, tuple[int, ...]], Float64Array]] = {
    "normal": _normal,
    "outliers": _outliers,
    "massive": _massive,
    "massive_channels": _massive_channels,
    "tiny": _tiny,
    "alternating": _alternating,
    "one_signed": _one_signed,
    "ones": _ones,
    "integers": _integers,
    "one_hot": _one_hot,
    "zeros": _zeros,
}
GENERAL = ("normal", "outliers", "massive", "massive_channels", "tiny", "alternating", "one_signed")


def array(recipe: Recipe, shape: tuple[int, ...], fmt: Format, *, stream: int = 0) -> NDArray[np.generic]:
    """The array of ``recipe`` in ``fmt``'s storage dtype, clipped to its finite range; ``stream`` separates q, k, v."""
    rng = np.random.default_rng([recipe.seed, stream])
    values = recipe.gain * FAMILIES[recipe.family](rng, shape)
    return np.asarray(fmt.store(np.clip(values, -fmt.max_finite, fmt.max_finite)))


@dataclass(frozen=True, slots=True)
class Logits:
    """What to plant in the scores of attention by steering k along a direction shared by all q rows.

    kind: ``plain``, ``offset`` (a common score added to every key), ``ascending``, ``descending``, ``peak`` (one key), ``sink`` (first key),
    ``needle`` (last key), ``ties`` (several equal largest). size: in nats of the scaled score.
    """

    kind: str = "plain"
    size: float = 0.0


KINDS = ("plain", "offset", "ascending", "descending", "peak", "sink", "needle", "ties")


def plant(
    q: Float64Array, k: Float64Array, scale: float, logits: Logits, seed: int
) -> tuple[Float64Array, Float64Array]:
    """q [.., Sq, D] and k [.., Sk, D] with one channel given over to the planted scores (exact up to storage rounding)."""
    if logits.kind == "plain":
        return q, k
    q, k = q.copy(), k.copy()
    keys = k.shape[-2]
    profile = {
        "offset": np.ones(keys),
        "ascending": np.linspace(0.0, 1.0, keys),
        "descending": np.linspace(1.0, 0.0, keys),
        "peak": (np.arange(keys) == seed % keys).astype(np.float64),
        "sink": (np.arange(keys) == 0).astype(np.float64),
        "needle": (np.arange(keys) == keys - 1).astype(np.float64),
        "ties": (np.arange(keys) % 3 == 0).astype(np.float64),
    }[logits.kind]
    # The channel's product q0 k0 scale is the planted score; both factors share its magnitude so that 16-bit formats hold it.
    total = logits.size / scale if scale else 0.0
    root = float(np.sqrt(abs(total))) if total else 0.0
    q[..., 0] = root
    k[..., 0] = np.sign(total) * root * profile
    if logits.kind == "ties":
        k[..., profile > 0, 1:] = 0.0
    return q, k
