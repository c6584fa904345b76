"""Which bound belongs to which op, and the type that all bounds return. Adding a bound is adding a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.contract import Contract
from oracle.case import Case
from oracle.enclosure import Block
from oracle.formats import Float64Array, Format


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """For one output of one block: the largest legal |error| per element, and where a non-finite value is legal.

    bound [r, c] float64, >= 0; inf or nan where nothing is promised. may_overflow [r, c]: the contract's own
    arithmetic may overflow there, so that inf or nan is no defect (counted as EXEMPT, never as PASS).
    """

    bound: Float64Array
    may_overflow: NDArray[np.bool_]


Bounds = Callable[[Case, Block, Sequence[Contract], Mapping[str, Format]], list[dict[str, Bounded]]]
"""(case, block, forms, output name -> observed format) -> one dict of output name -> Bounded per form."""


def bounds_of(op: str) -> Bounds:
    """The bound function of ``op``; KeyError for an op without one (the coverage test names it)."""
    from oracle.bounds import (
        attention,
        attention_backward,
        attention_layouts,
        gqa_block,
        mla,
        mla_backward,
        mla_block,
        rope,
        softmax,
        softmax_backward,
    )

    return {
        "attention": attention.bounds,
        "attention_backward": attention_backward.bounds,
        "attention_varlen": attention_layouts.bounds,
        "attention_paged": attention_layouts.bounds,
        "mla": mla.bounds,
        "gqa_block": gqa_block.bounds,
        "mla_block": mla_block.bounds,
        "mla_backward": mla_backward.bounds,
        "rope": rope.bounds,
        "rope_backward": rope.bounds,
        "rope_apply": rope.bounds,
        "softmax": softmax.bounds,
        "log_softmax": softmax.bounds,
        "logsumexp": softmax.bounds,
        "softmax_backward": softmax_backward.bounds,
    }[op]
