"""Rows that see no key: what a target gives must follow its stated conventions, with a sink its definition.

The definition gives such a row 0 and passes no gradient through it. A forward pass that gives it NaN passes NaN to
every gradient that sums over it; one that gives it the mean of V passes its cotangent to every key. What a stated
convention of the forward pass implies is no fault of the gradient: `unpromised`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.case import Case
from oracle.formats import StoredArray, format_of
from oracle.ops.table import op_named
from properties.subject import Subject


def empty_rows(subject: Subject, case: Case, block: Block, values: Mapping[str, StoredArray]) -> str:
    """What contradicts the stated conventions for the empty rows of a block, or nothing."""
    if not block.empty.any():
        return ""
    stated = {name: subject.conventions.get(name) for name in ("empty_row", "empty_row_lse")}
    if "sink" in block.values:
        # The sink's weight is 1, and its value nothing.
        stated["empty_row"] = "zero"
        if case.options.get("lse_sink", "included") == "included":
            stated["empty_row_lse"] = None
            if "lse" in values and not _is_the_sink(subject, block, values["lse"]):
                return "the LSE of a row that sees nothing but a sink is not the sink"
    for name, convention, value in (("out", "empty_row", "value"), ("lse", "empty_row_lse", "LSE")):
        meant = stated[convention]
        if meant is None or name not in values:
            continue
        rows = values[name][block.empty].astype(np.float64)
        kept = {
            "zero": np.all(rows == 0),
            "nan": np.isnan(rows).all(),
            "mean": np.isfinite(rows).all(),
            "-inf": np.isneginf(rows).all(),
            "+inf": np.isposinf(rows).all(),
            "finite": np.isfinite(rows).all(),
        }[meant]
        if not kept:
            return f"the {value} of an empty row is not {meant}, as the target's convention says"
    return ""


def unpromised(subject: Subject, case: Case, key: tuple[int, ...]) -> str:
    """Why a block of a gradient need not be what the definition says: the forward pass's convention; else nothing."""
    stated, gradient = subject.conventions.get("empty_row", "zero"), op_named(case.op).gradient
    if gradient is None or stated == "zero" or not gradient.sums_empty(case, key):
        return ""
    return stated


def promised_rows(subject: Subject, case: Case, block: Block, values: Mapping[str, StoredArray]) -> NDArray[np.bool_]:
    """[r]: rows of the block whose observed ``values`` must be near the exact ones."""
    live = ~(block.empty | block.undefined)
    stated = unpromised(subject, case, block.key)
    if stated == "mean":
        return np.zeros_like(live)
    if stated == "nan":
        for value in values.values():
            live &= np.isfinite(value.astype(np.float64)).all(axis=1)
    return live


def _is_the_sink(subject: Subject, block: Block, lse: StoredArray) -> bool:
    """To within three roundings: of the sink in another base and back, and of the result."""
    sink = block.part("sink").hi[block.empty]
    base = subject.nat()
    wide = np.float32 if lse.dtype != np.float64 else np.float64
    unit = format_of(lse).unit_roundoff + 2 * float(np.finfo(wide).eps)
    return bool(np.all(np.abs(lse[block.empty].astype(np.float64) - base * sink) <= unit * np.abs(base * sink)))
