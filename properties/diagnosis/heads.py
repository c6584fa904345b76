"""One head of attention with nothing implied, so that a counterfactual is a change of a few of its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.block import Rows
from oracle.case import Case
from oracle.formats import Float64Array, StoredArray
from oracle.ops.attention.case import head
from oracle.ops.attention.options import is_set, taken, with_meanings
from properties.diagnosis.counterfactual import Counterfactual, FailingCase, Key
from properties.ops.attention.options import TABLE

TILES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Rows of one query head: q [r, D], k [n, D], v [n, Dv] as stored; visible, bias [r, n]; bias and scale or None.

    bias: additive mask and ALiBi together. kept: what else is set, as options of a case of this head alone.
    """

    key: Key
    rows: Rows
    q: StoredArray
    k: StoredArray
    v: StoredArray
    visible: NDArray[np.bool_]
    bias: Float64Array | None
    scale: float | None
    kept: Mapping[str, object] = field(default_factory=dict)

    def case(self) -> Case:
        """These rows as a case of their own, one batch entry and one head."""
        options = {**self.kept} | ({} if self.scale is None else {"scale": self.scale})
        if self.bias is not None:
            options["attn_mask"] = np.where(self.visible, self.bias, -np.inf)
        elif not self.visible.all():
            options["attn_mask"] = self.visible
        return Case("attention", {"q": self.q[None, None], "k": self.k[None, None], "v": self.v[None, None]}, options)

    def masked(self, mask: NDArray[Any]) -> Head:
        """With a mask [r, n] on top, boolean (True = may attend) or additive."""
        if mask.dtype == np.bool_:
            return replace(self, visible=self.visible & mask)
        hidden = np.isneginf(mask.astype(np.float64))
        bias = np.where(hidden, 0.0, mask.astype(np.float64)) + (0.0 if self.bias is None else self.bias)
        return replace(self, visible=self.visible & ~hidden, bias=bias)

    def biased(self, factor: float) -> Head:
        return self if self.bias is None else replace(self, bias=self.bias * factor)

    def scores(self) -> Float64Array:
        """[r, n] in float64, -inf where hidden."""
        scale = self.scale if self.scale is not None else 1.0 / float(np.sqrt(self.q.shape[1]))
        with np.errstate(all="ignore"):
            s = self.q.astype(np.float64) @ self.k.astype(np.float64).T * scale
        return np.where(self.visible, s if self.bias is None else s + self.bias, -np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """All heads of a case, made when they are asked for."""

    case: Case

    @property
    def keys(self) -> int:
        return int(self.case.arrays["k"].shape[2])

    def head(self, key: Key, rows: Rows) -> Head:
        q, k, v = (self.case.arrays[n] for n in ("q", "k", "v"))
        b, h = key
        shared = h // (q.shape[1] // k.shape[1])
        bare = self.case.without_options("attn_mask")
        x = head(bare, key, rows)
        made = Head(
            key,
            rows,
            q[b, h][rows],
            k[b, shared],
            v[b, shared],
            x.visible,
            x.tilted(),
            bare.options.get("scale"),
            _of_one_head(self.case, h),
        )
        mask = self.case.options.get("attn_mask")
        if mask is None:
            return made
        return made.masked(np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))[key][rows])

    def key_that_is_missing(self, failing: FailingCase) -> int | None:
        """The key without which the worst row comes nearest to what was observed; None where no row tells."""
        weights, v, y = self._worst_row(failing)
        if not np.isfinite(y).all() or (weights > 0).sum() < 2:
            return None
        with np.errstate(all="ignore"):
            without = (weights @ v - weights[:, None] * v) / (1 - weights)[:, None]
            gap = np.abs(without - y).max(axis=1)
        gap = np.where(np.isfinite(gap) & (weights > 0), gap, np.inf)
        return int(np.argmin(gap))

    def tiles_that_changed_places(self, failing: FailingCase) -> Iterator[tuple[int, int]]:
        """(first key, tile): for each size the neighbouring tiles whose exchange comes nearest to the worst row."""
        weights, v, y = self._worst_row(failing)
        if not np.isfinite(y).all():
            return
        for t in TILES[::-1]:
            gaps = {}
            for first in range(0, self.keys - 2 * t + 1, t):
                one, two = slice(first, first + t), slice(first + t, first + 2 * t)
                moved = weights[one] @ (v[two] - v[one]) + weights[two] @ (v[one] - v[two])
                gaps[first] = float(np.abs(weights @ v + moved - y).max())
            if gaps:
                yield min(gaps, key=lambda first: gaps[first]), t

    def _worst_row(self, failing: FailingCase) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Weights [n], values [n, Dv] and observed output [Dv] of the row that is most wrong."""
        place, row = failing.worst
        judged = failing.blocks[place]
        head = self.head(judged.block.key, judged.block.rows[row : row + 1])
        scores = head.scores()[0]
        with np.errstate(all="ignore"):
            w = np.exp(scores - scores.max())
            return np.nan_to_num(w / w.sum()), head.v.astype(np.float64), judged.values["out"][row]


def _of_one_head(case: Case, h: int) -> dict[str, Any]:
    """The options of one head that are neither its mask nor its bias nor its numbers."""
    kept = with_meanings([row.name for row in TABLE if row.kept])
    return taken({name: case.options[name] for name in kept if is_set(case, name)}, Hq=[h])


def last_missing(n: int, one: str, many: str) -> Iterator[tuple[str, int]]:
    """("the last key was", 1), ("the last 3 keys were", 3), ...: as many of ``n`` as do not fill a tile."""
    for count in sorted({1} | {n % t for t in TILES if n % t and n > t}):
        yield (f"the last {one} was" if count == 1 else f"the last {count} {many} were"), count


def of_head(heads: Heads, says: str, make: Callable[[Head], Head], *, choice: str = "") -> Counterfactual:
    """The target computed ``make`` of each head."""

    def source(key: Key, rows: Rows) -> tuple[Case, Key, Rows]:
        return make(heads.head(key, rows)).case(), (0, 0), np.arange(len(rows))

    return Counterfactual(says, source, choice=choice)
