"""Recipes: small, shrinkable descriptions of tensors, and the arrays they stand for.

A recipe is a distribution, a seed and a few planted features; the array follows from it and the shape alone, so that a
failing case shrinks by shrinking a handful of small integers, whatever the size of its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oracle.formats import Float64Array, Format, StoredArray

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


# Lists of inputs share most of their arrays, and are made again for each of their parts.
_MADE, _LARGEST = 512, 2**14


def array(recipe: Recipe, shape: tuple[int, ...], fmt: Format, *, stream: int = 0) -> StoredArray:
    """The array of ``recipe`` in ``fmt``'s storage dtype, clipped to its finite range; ``stream`` separates q, k, v.

    Nobody may change it: small ones are handed out again.
    """
    return (_small if math.prod(shape) <= _LARGEST else _array)(recipe, shape, fmt, stream)


def _array(recipe: Recipe, shape: tuple[int, ...], fmt: Format, stream: int) -> StoredArray:
    rng = np.random.default_rng([recipe.seed, stream])
    made = fmt.store(recipe.gain * FAMILIES[recipe.family](rng, shape), saturate=True)
    made.setflags(write=False)
    return made


_small = lru_cache(_MADE)(_array)


@dataclass(frozen=True, slots=True)
class Logits:
    """What to plant in the scores of attention by steering k along a direction shared by all q rows.

    kind: ``plain``, ``offset`` (a common score added to every key), ``ascending``, ``descending``, ``peak`` (one key),
    ``sink`` (first key), ``needle`` (last key), ``ties`` (several equal largest). size: in nats of the scaled score.
    """

    kind: str = "plain"
    size: float = 0.0


KINDS = ("plain", "offset", "ascending", "descending", "peak", "sink", "needle", "ties")


def plant(
    q: Float64Array, k: Float64Array, scale: float, logits: Logits, seed: int
) -> tuple[Float64Array, Float64Array]:
    """q [.., Sq, D], k [.., Sk, D] with one channel given over to the planted scores (exact up to storage rounding)."""
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
    # The channel's product q0 k0 scale is the planted score; its factors share its magnitude, so that 16 bits hold it.
    total = logits.size / scale if scale else 0.0
    root = float(np.sqrt(abs(total))) if total else 0.0
    q[..., 0] = root
    k[..., 0] = np.sign(total) * root * profile
    if logits.kind == "ties":
        k[..., profile > 0, 1:] = 0.0
    return q, k


Hides = Callable[[Generator, tuple[int, ...]], NDArray[np.bool_]]


def _hide_some(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    return rng.random(shape) < 0.7


def _hide_first(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    # At least half of the keys, so that long rows begin with whole tiles of which nothing is seen.
    start = rng.integers((shape[-1] + 1) // 2, shape[-1], (*shape[:-1], 1)) if shape[-1] > 1 else 0
    return np.broadcast_to(np.arange(shape[-1]) >= start, shape).copy()


def _hide_last(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    stop = rng.integers(1, shape[-1] // 2 + 2, (*shape[:-1], 1))
    return np.broadcast_to(np.arange(shape[-1]) < stop, shape).copy()


def _hide_far(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    rows, keys = shape[-2:]
    distance = np.arange(keys) - (np.arange(rows)[:, None] + keys - rows)
    return np.broadcast_to(np.abs(distance) <= 5, shape).copy()


def _hide_all_but_one(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    kept: NDArray[np.bool_] = np.arange(shape[-1]) == rng.integers(0, shape[-1], (*shape[:-1], 1))
    return kept


def _hide_rows(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.asarray(_hide_some(rng, shape) & (np.arange(shape[-2]) % 3 != 1)[:, None])


def _hide_all(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.zeros(shape, dtype=bool)


HIDES: dict[str, Hides] = {
    "some": _hide_some,
    "first": _hide_first,
    "last": _hide_last,
    "far": _hide_far,
    "all but one": _hide_all_but_one,
    "rows": _hide_rows,
    "all": _hide_all,
}
EMPTYING = ("rows", "all")
KINDS_OF_MASKS = {"bool": "boolean_mask", "additive": "additive_mask"}
"""Kind -> the limit that is about it."""
OVER = ("sequences", "rows", "keys", "heads")


@dataclass(frozen=True, slots=True)
class Mask:
    """An attention mask.

    kind: ``bool`` (True = may attend) or ``additive`` (in the input's dtype; -inf hides). hides: `HIDES`; those outside
    `EMPTYING` leave every row a key. over: what it differs along: ``rows`` [Sq, Sk], ``keys`` [B, 1, 1, Sk],
    ``sequences`` [B, 1, Sq, Sk], ``heads`` [B, Hq, Sq, Sk].
    """

    kind: str = "bool"
    hides: str = "some"
    over: str = "sequences"


def mask_array(mask: Mask, seed: int, shape: tuple[int, int, int, int], fmt: Format) -> StoredArray:
    """The array of ``mask`` for scores of ``shape`` [B, Hq, Sq, Sk]."""
    batch, heads, rows, keys = shape
    sizes = {
        "rows": (rows, keys),
        "keys": (batch, 1, 1, keys),
        "sequences": (batch, 1, rows, keys),
        "heads": (batch, heads, rows, keys),
    }
    rng = np.random.default_rng([seed, 9])
    keep = HIDES[mask.hides](rng, sizes[mask.over])
    if mask.hides not in EMPTYING:
        keep[..., 0] |= ~keep.any(axis=-1)
    if mask.kind == "bool":
        return keep
    return np.asarray(fmt.store(np.where(keep, rng.standard_normal(keep.shape), -np.inf)))
