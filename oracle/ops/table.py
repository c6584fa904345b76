"""The table of ops. Adding an op is adding a row."""

from __future__ import annotations

from oracle.ops.attention import gradient_case as attention_gradient_case
from oracle.ops.attention import row as attention_row
from oracle.ops.blocks import gqa_case
from oracle.ops.blocks import mla_case as mla_block_case
from oracle.ops.layouts import case as layouts_case
from oracle.ops.mla import case as mla_case
from oracle.ops.mla import gradient_case as mla_gradient_case
from oracle.ops.op import Op
from oracle.ops.rope import case as rope_case
from oracle.ops.softmax import case as softmax_case
from oracle.ops.softmax import gradient_case as softmax_gradient_case

_OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *attention_row.OPS,
        *attention_gradient_case.OPS,
        *layouts_case.OPS,
        *mla_case.OPS,
        *mla_gradient_case.OPS,
        *mla_block_case.OPS,
        *gqa_case.OPS,
        *rope_case.OPS,
        *softmax_case.OPS,
        *softmax_gradient_case.OPS,
    )
}


class UnknownOp(ValueError):
    """An op that does not exist; the message lists the known ones."""


def ops() -> dict[str, Op]:
    """All ops by name."""
    return dict(_OPS)


def op_named(name: str) -> Op:
    """The op of this name; UnknownOp without one."""
    if name not in _OPS:
        raise UnknownOp(f"unknown op {name!r}; known: {', '.join(_OPS)}")
    return _OPS[name]
