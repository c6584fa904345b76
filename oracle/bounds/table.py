"""Which bound belongs to which op. Adding a bound is adding a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from oracle.block import Block
from oracle.bounds.attention import gradient as attention_backward
from oracle.bounds.attention import layouts as attention_layouts
from oracle.bounds.attention import output as attention
from oracle.bounds.blocks import gqa as gqa_block
from oracle.bounds.blocks import mla as mla_block
from oracle.bounds.bounded import Bounded
from oracle.bounds.mla import gradient as mla_backward
from oracle.bounds.mla import output as mla
from oracle.bounds.rope import rotation as rope
from oracle.bounds.softmax import gradient as softmax_backward
from oracle.bounds.softmax import output as softmax
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import Format

Bounds = Callable[[Case, Block, Sequence[Contract], Mapping[str, Format]], list[dict[str, Bounded]]]
"""(case, block, forms, output name -> observed format) -> one dict of output name -> Bounded per form."""

_BOUNDS: dict[str, Bounds] = {
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
}


_AT_ONCE = frozenset({"attention", "attention_varlen", "attention_paged", "attention_backward"})
"""Ops whose bounds take a stack as they take a block: their arrays then have a leading axis, too."""


def at_once(op: str, blocks: Sequence[Block]) -> list[tuple[Block, Sequence[tuple[int, int | None]]]]:
    """What to ask bounds of for these blocks: a block, or the stack that several are of, with (index of a block, its
    place in the stack) for each of them."""
    found: dict[int, tuple[Block, list[tuple[int, int | None]]]] = {}
    for index, block in enumerate(blocks):
        whole, place = block.stack if block.stack and op in _AT_ONCE and not block.patches else (block, None)
        found.setdefault(id(whole), (whole, []))[1].append((index, place))
    return list(found.values())


def of_head(found: Sequence[Mapping[str, Bounded]], place: int | None) -> Sequence[Mapping[str, Bounded]]:
    """Of a stack's bounds, those of one head."""
    if place is None:
        return found
    return [{n: Bounded(b.bound[place], b.may_overflow[place]) for n, b in form.items()} for form in found]


def bounds_of(op: str) -> Bounds:
    """The bound function of ``op``; KeyError for an op without one (the coverage test names it)."""
    return _BOUNDS[op]
