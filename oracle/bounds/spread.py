"""How far the values of a row lie from its output: the sums over keys that bounds of O are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.enclosure import Enclosure
from oracle.formats import Float64Array

# Numbers of v [n, Dv] that are worked on at a time, so that they stay in cache.
CACHED = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Sums over visible keys per output: sum w |v - O| for each given w, sum |v - O|, max |v - O|, sum |v|, max |v|.

    All are upper bounds; `distance` is one from max |v - O| or from sum |v| and O, whichever is less. magnitudes: sum
    w |v| for each w, as float64 sums it.
    """

    weighted: list[Float64Array]
    distance: Float64Array
    farthest: Float64Array
    size: Float64Array
    largest: Float64Array
    magnitudes: list[Float64Array]


def spread(v: Float64Array, out: Enclosure, weights: Sequence[Float64Array], visible: NDArray[np.bool_]) -> Spread:
    """v [n, Dv], out [r, Dv], each weight [r, n] (zero where not visible) -> all [r, Dv]."""
    rows, width = out.hi.shape
    across, magnitude = np.ascontiguousarray(v.T), np.abs(v)
    everything = bool(visible.all())
    count = np.full((rows, 1), len(v)) if everything else visible.sum(axis=1, keepdims=True)
    size = np.tile(magnitude.sum(axis=0), (rows, 1)) if everything else visible.astype(np.float64) @ magnitude
    high, low = _extremes(across, visible)
    reach = out.rad + np.abs(out.lo)
    largest = np.where(count > 0, np.maximum(np.abs(high), np.abs(low)), 0.0)
    farthest = np.where(count > 0, np.maximum(high - out.hi, out.hi - low) + reach, 0.0)
    both = np.hstack([v, magnitude])
    weighted, magnitudes = [], []
    for weight, sums in zip(weights, _raised(np.ascontiguousarray(v), out.hi, weights), strict=True):
        whole = weight.sum(axis=1, keepdims=True)
        products = weight @ both
        plain, size_of = products[:, :width], products[:, width:]
        # |v - O| = 2 max(v, O) - v - O; what the three sums may have rounded off, and then cancelled.
        slack = 2.0**-50 * (len(v) + 8) * (size_of + whole * np.abs(out.hi))
        weighted.append(np.maximum(2 * sums - plain - whole * out.hi, 0.0) + slack + whole * reach)
        magnitudes.append(size_of)
    distance = np.minimum(size + count * (np.abs(out.hi) + reach), count * farthest)
    return Spread(weighted, distance, farthest, size, largest, magnitudes)


def _raised(v: Float64Array, out: Float64Array, weights: Sequence[Float64Array]) -> Float64Array:
    """sum w max(v, O): v [n, Dv], out [r, Dv], each weight [r, n] -> [weights, r, Dv]."""
    keys, width = v.shape
    sums = np.zeros((len(out), len(weights), width))
    step = max(64, CACHED // max(1, width))
    for start in range(0, keys, step):
        piece = v[start : start + step]
        larger = np.empty_like(piece)
        parts = np.stack([weight[:, start : start + step] for weight in weights], axis=1)
        for total, row, part in zip(sums, out, parts, strict=True):
            np.maximum(piece, row, out=larger)
            total += part @ larger
    return sums.transpose(1, 0, 2)


def _extremes(across: Float64Array, visible: NDArray[np.bool_]) -> tuple[Float64Array, Float64Array]:
    """Largest and smallest visible entry: across [Dv, n], visible [r, n] -> two of [r, Dv]; -inf and inf for an empty
    row."""
    rows, n = visible.shape
    high, low = np.full((rows, len(across)), -np.inf), np.full((rows, len(across)), np.inf)
    count = np.asarray(visible.sum(axis=1))
    last = np.where(count > 0, n - np.argmax(visible[:, ::-1], axis=1), 0)
    whole, run = count == n, (count == last) & (count > 0) & (count < n)
    if whole.any():
        high[whole], low[whole] = across.max(axis=1, initial=-np.inf), across.min(axis=1, initial=np.inf)
    if run.any():
        # Keys from the first on, as under a causal mask: running extremes serve all rows.
        high[run] = np.maximum.accumulate(across, axis=1)[:, count[run] - 1].T
        low[run] = np.minimum.accumulate(across, axis=1)[:, count[run] - 1].T
    for i in np.flatnonzero(~whole & ~run & (count > 0)):
        seen = across[:, visible[i]]
        high[i], low[i] = seen.max(axis=1), seen.min(axis=1)
    return high, low
