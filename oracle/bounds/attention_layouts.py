"""G1 of packed and of paged attention: that of the dense case which each sequence is (`oracle.bounds.attention`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oracle.bounds import attention
from oracle.bounds.contract import Contract
from oracle.bounds.table import Bounded
from oracle.case import Case
from oracle.enclosure import Block
from oracle.formats import Format
from oracle.ops.attention_layouts import dense


def bounds(
    case: Case, block: Block, forms: Sequence[Contract], formats: Mapping[str, Format]
) -> list[dict[str, Bounded]]:
    """One dict of ``out`` [r, Dv] and ``lse`` [r, 1] per form; see `oracle.bounds.table.Bounds`."""
    n, h = block.key
    return attention.bounds(dense(case, n), replace(block, key=(0, h)), forms, formats)
