"""How far the values of a row lie from its output: the sums over keys that bounds of O are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from oracle.enclosure import Enclosure
from oracle.formats import Float64Array

# Numbers of v [n, Dv] that are worked on at a time, so that they stay in cache, and that are multiplied at a time.
CACHED, MULTIPLIED = 2**16, 2**17
# How many values may lie between zero and some output of their column, of all, and between zero and the output, of all
# pairs of both, before it does not pay to list them; products of a weight and a value from which on it may.
SORTED, LISTED, MANY = 1 / 6, 1 / 40, 2**22


@dataclass(frozen=True, slots=True, eq=False)
class Near:
    """Values [m] between zero and an output of their column, by column and in order, and their keys [m].

    starts [Dv + 1]: where each column's begin. zero [Dv]: where each column's begin that are not negative.
    """

    keys: NDArray[np.int64]
    values: Float64Array
    starts: NDArray[np.int64]
    zero: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The v [n, Dv] of a head, as sums over its keys read them, whichever rows they are for (or of a stack's heads).

    magnitude [n, Dv]. total, high, low [Dv]: sum of magnitudes, largest and smallest entry. near: None where there are
    too many, or where it is not worth while.
    """

    v: Float64Array
    magnitude: Float64Array
    total: Float64Array
    high: Float64Array
    low: Float64Array
    near: Near | None


def values_of(v: Float64Array, out: Float64Array, *, magnitude: Float64Array | None = None) -> Values:
    """Of v [n, Dv], whose magnitude may be known, for rows of the outputs [r, Dv]."""
    v, size = np.ascontiguousarray(v), np.abs(v) if magnitude is None else magnitude
    high, low = v.max(axis=-2, initial=-np.inf), v.min(axis=-2, initial=np.inf)
    near = _near(v, out) if v.ndim == 2 and len(out) * v.size >= MANY else None
    return Values(v, size, size.sum(axis=-2), high, low, near)


def _near(v: Float64Array, out: Float64Array) -> Near | None:
    low, high = np.fmin.reduce(out, axis=0, initial=0.0), np.fmax.reduce(out, axis=0, initial=0.0)
    between = v >= low
    between &= v < high
    if np.count_nonzero(between) > SORTED * v.size:
        return None
    key, column = np.nonzero(between)
    values = v[between]
    order = np.lexsort((values, column))
    key, column, values = key[order], column[order], values[order]
    starts = np.searchsorted(column, np.arange(v.shape[1] + 1))
    negative = np.bincount(column[values < 0], minlength=v.shape[1])
    return Near(key, values, starts, starts[:-1] + negative)


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


def spread(x: Values, out: Enclosure, weights: Sequence[Float64Array], visible: NDArray[np.bool_]) -> Spread:
    """Of values v [n, Dv], out [r, Dv], each weight [r, n] (zero where not visible) -> all [r, Dv]."""
    keys, width = x.v.shape[-2:]
    whole = visible.all(axis=(-2, -1), keepdims=True)
    everything = bool(whole.all())
    if everything:
        count = np.full((*out.hi.shape[:-1], 1), keys)
        size, high, low = (np.broadcast_to(a[..., None, :], out.hi.shape) for a in (x.total, x.high, x.low))
    else:
        count = visible.sum(axis=-1, keepdims=True)
        size = np.where(whole, x.total[..., None, :], visible.astype(np.float64) @ x.magnitude)
        high, low = _extremes(x, visible)
    reach = out.rad + np.abs(out.lo)
    largest = np.where(count > 0, np.maximum(np.abs(high), np.abs(low)), 0.0)
    farthest = np.where(count > 0, np.maximum(high - out.hi, out.hi - low) + reach, 0.0)
    between = None if x.near is None else _between(x.near, out.hi, keys)
    raised = _raised(x.v, out.hi, weights) if between is None else None
    weighted, magnitudes = [], []
    products = _products(x, weights, signs=raised is None)
    for index, (weight, product) in enumerate(zip(weights, products, strict=True)):
        whole = weight.sum(axis=-1, keepdims=True)
        beside, size_of = product[..., :width], product[..., width:]
        if raised is not None:
            # |v - O| = 2 max(v, O) - v - O.
            apart = 2 * raised[index] - beside - whole * out.hi
        else:
            # |v - O| = |v| - O sign(v), but for a v between zero and O: there |v - O| is missing twice.
            assert between is not None
            apart = size_of - beside * out.hi + 2 * between.sums(weight)
        # What the three sums may have rounded off, and then cancelled.
        slack = 2.0**-50 * (keys + 8) * (size_of + whole * np.abs(out.hi))
        weighted.append(np.maximum(apart, 0.0) + slack + whole * reach)
        magnitudes.append(size_of)
    distance = np.minimum(size + count * (np.abs(out.hi) + reach), count * farthest)
    return Spread(weighted, distance, farthest, size, largest, magnitudes)


def _products(x: Values, weights: Sequence[Float64Array], *, signs: bool) -> list[Float64Array]:
    """sum w v (or sum w sign v, where that of zero is 1) beside sum w |v|, for each w [r, n]: [r, 2 Dv]."""
    keys, width = x.v.shape[-2:]
    step = min(keys, max(64, MULTIPLIED // max(1, width)))
    sums = [np.zeros((*weight.shape[:-1], 2 * width)) for weight in weights]
    scratch = np.empty((*x.v.shape[:-2], step, 2 * width))
    for start in range(0, keys, step):
        part = (..., slice(start, start + step), slice(None))
        both = scratch[..., : min(step, keys - start), :]
        left, both[..., width:] = both[..., :width], x.magnitude[part]
        # A negative zero plus zero is a positive one.
        np.add(x.v[part], 0.0, out=left)
        if signs:
            np.copysign(1.0, left, out=left)
        for total, weight in zip(sums, weights, strict=True):
            total += weight[..., start : start + step] @ both
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """Values between zero and the output, of all outputs [r, Dv] one after another: places in [r, n], |v - O|.

    starts: where those of each output that has some begin; which: which outputs these are.
    """

    shape: tuple[int, int]
    places: NDArray[np.int64]
    gaps: Float64Array
    starts: NDArray[np.int64]
    which: NDArray[np.int64]

    def sums(self, weight: Float64Array) -> Float64Array:
        """sum w |v - O| over them: [r, Dv]."""
        sums = np.zeros(self.shape)
        if len(self.starts):
            terms = weight.ravel()[self.places]
            terms *= self.gaps
            sums.ravel()[self.which] = np.add.reduceat(terms, self.starts)
        return sums


def _between(near: Near, out: Float64Array, keys: int) -> Between | None:
    """None if there are too many."""
    rows, width = out.shape
    at = np.empty((rows, width), dtype=np.int64)
    for column, (start, stop) in enumerate(pairwise(near.starts.tolist())):
        at[:, column] = start + np.searchsorted(near.values[start:stop], out[:, column])
    at = np.where(np.isnan(out), near.zero, at)
    first = np.minimum(at, near.zero).ravel()
    counts = (np.maximum(at, near.zero).ravel()) - first
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if total > LISTED * out.size * keys:
        return None
    begin = ends - counts
    index = np.arange(total)
    index += np.repeat(first - begin, counts)
    gaps = np.abs(near.values[index] - np.repeat(out.ravel(), counts))
    places = near.keys[index]
    places += np.repeat(np.repeat(np.arange(rows) * keys, width), counts)
    which = np.flatnonzero(counts)
    return Between((rows, width), places, gaps, begin[which], which)


def _raised(v: Float64Array, out: Float64Array, weights: Sequence[Float64Array]) -> Float64Array:
    """sum w max(v, O): v [n, Dv], out [r, Dv], each weight [r, n] -> [weights, r, Dv]."""
    keys, width = v.shape[-2:]
    sums = np.zeros((*out.shape[:-1], len(weights), width))
    step = max(64, CACHED // max(1, width))
    for start in range(0, keys, step):
        piece = v[..., None, start : start + step, :]
        many = max(1, CACHED // max(1, piece.size))
        parts = np.stack([weight[..., start : start + step] for weight in weights], axis=-2)
        larger = np.empty(())
        for first in range(0, out.shape[-2], many):
            rows = out[..., first : first + many, None, :]
            shape = np.broadcast_shapes(piece.shape, rows.shape)
            larger = np.maximum(piece, rows, out=larger if larger.shape == shape else None)
            sums[..., first : first + many, :, :] += parts[..., first : first + many, :, :] @ larger
    return np.moveaxis(sums, -2, 0)


def _extremes(x: Values, visible: NDArray[np.bool_]) -> tuple[Float64Array, Float64Array]:
    """Largest and smallest visible entry of each column: two of [r, Dv]; -inf and inf for an empty row."""
    rows, n = visible.shape[-2:]
    if visible.size * x.v.shape[-1] <= CACHED:
        seen, v = visible[..., None], x.v[..., None, :, :]
        return np.where(seen, v, -np.inf).max(axis=-2), np.where(seen, v, np.inf).min(axis=-2)
    if visible.ndim > 2:
        heads = [Values(x.v[i], x.magnitude[i], x.total[i], x.high[i], x.low[i], None) for i in range(len(x.v))]
        found = [_extremes(head, own) for head, own in zip(heads, visible, strict=True)]
        return np.stack([high for high, _ in found]), np.stack([low for _, low in found])
    high, low = np.full((rows, x.v.shape[1]), -np.inf), np.full((rows, x.v.shape[1]), np.inf)
    count = np.asarray(visible.sum(axis=1))
    last = np.where(count > 0, n - np.argmax(visible[:, ::-1], axis=1), 0)
    whole, run = count == n, (count == last) & (count > 0) & (count < n)
    high[whole], low[whole] = x.high, x.low
    if run.any():
        # Keys from the first on, as under a causal mask: running extremes serve all rows.
        high[run] = np.maximum.accumulate(x.v, axis=0)[count[run] - 1]
        low[run] = np.minimum.accumulate(x.v, axis=0)[count[run] - 1]
    for i in np.flatnonzero(~whole & ~run & (count > 0)):
        seen = x.v[visible[i]]
        high[i], low[i] = seen.max(axis=0), seen.min(axis=0)
    return high, low
