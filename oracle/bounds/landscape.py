"""What the rows of one block look like to a bound: scores, weights and sums from above, as enclosures give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.enclosure import Enclosure
from oracle.formats import Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Landscape:
    """Upper bounds of what one block's rows look like, from enclosures; all [r, n] or [r, 1], zero where not visible
    (of a stack of heads with a leading axis).

    everything: whether all of it is visible. slack: how far the true maximum of a row may lie from the shift. sink:
    whether the last key is one.
    """

    keys: int
    visible: NDArray[np.bool_]
    everything: bool
    scores: Float64Array
    scores_rad: Float64Array
    size: Float64Array
    below_max: Float64Array
    log_p: Float64Array
    p: Float64Array
    shift: Float64Array
    max_size: Float64Array
    slack: Float64Array
    lse_size: Float64Array
    total_inverse: Float64Array
    log_total: Float64Array
    sink: bool = False

    def seen(self, a: Float64Array, otherwise: float = 0.0) -> Float64Array:
        """``a`` [r, n] where visible."""
        return a if self.everything else np.where(self.visible, a, otherwise)


def landscape(block: Block) -> Landscape:
    """What the bounds need of a block that has parts scores [r, n], shift, total and lse [r, 1], perhaps a sink."""
    scores, shift = block.part("scores"), block.part("shift")
    total, lse = block.part("total"), block.part("whole_lse" if "whole_lse" in block.values else "lse")
    visible = block.visible_keys()
    if "sink" in block.values:
        # The last key is the sink: its value is 0.
        logit = block.part("sink")
        scores = Enclosure(*(np.concatenate(two, axis=-1) for two in zip(scores.parts(), logit.parts(), strict=True)))
        visible = np.concatenate([visible, np.ones((*visible.shape[:-1], 1), dtype=bool)], axis=-1)
    everything = bool(visible.all())

    def seen(a: Float64Array, otherwise: float) -> Float64Array:
        return a if everything else np.where(visible, a, otherwise)

    with np.errstate(all="ignore"):
        rad = seen(scores.rad, 0.0)
        slack = rad.max(axis=-1, keepdims=True, initial=0.0)
        size = seen(scores.upper_abs(), 0.0)
        below = shift.hi - scores.hi
        below += rad
        below += slack
        np.maximum(below, 0.0, out=below)
        below += 2.0**-52 * size
        lse_size = lse.upper_abs()
        # What the low parts of midpoints and the roundings of this line can move.
        moved = size + lse_size
        moved *= 2.0**-50
        log_p = scores.hi - lse.hi
        log_p += rad
        log_p += lse.rad
        log_p += moved
        log_p = seen(log_p, -np.inf)
        lowest = np.maximum(total.hi - total.rad, 0.5)
        return Landscape(
            keys=visible.shape[-1],
            visible=visible,
            everything=everything,
            scores=scores.hi,
            scores_rad=rad,
            size=size,
            below_max=seen(below, 0.0),
            log_p=log_p,
            p=np.exp(log_p),
            shift=shift.hi,
            max_size=np.abs(shift.hi) + slack,
            slack=slack,
            lse_size=lse_size,
            total_inverse=1.0 / lowest,
            log_total=np.maximum(np.log(total.upper_abs()), 0.0) + slack,
            sink="sink" in block.values,
        )


def inflation(land: Landscape, inner: int) -> float:
    """Covers the float64 roundings of evaluating the bound itself."""
    return 1.0 + 2.0**-52 * (land.keys + inner + 512)


def chosen(
    which: NDArray[np.bool_],
    one: Callable[[], tuple[Float64Array, ...]],
    other: Callable[[], tuple[Float64Array, ...]],
) -> tuple[Float64Array, ...]:
    """``one`` where ``which`` [1, 1] holds, else ``other``: head by head of a stack."""
    if which.all():
        return one()
    if not which.any():
        return other()
    return tuple(np.where(which, a, b) for a, b in zip(one(), other(), strict=True))
