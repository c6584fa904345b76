"""G1 of packed and of paged attention: that of the dense case which each sequence is
(`oracle.bounds.attention.output`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oracle.block import Block
from oracle.bounds.attention import output as attention
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import Format
from oracle.ops.layouts.case import dense, in_dense


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form, or of a stack's; see `oracle.bounds.table.Bounds`."""
    n, key = in_dense(block.key)
    return attention.bounds(dense(case, n), replace(block, key=key), forms, formats)
