"""An op as data: the complete row of what is true of it and of no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oracle.arithmetic.base import Arithmetic
from oracle.block import Block, Rows
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.formats import Float64Array


@dataclass(frozen=True, slots=True)
class Op:
    """One row.

    inputs: canonical array names, in order. outputs: names in the order a target returns them. options: canonical
    keyword names with their defaults. blocks, row_count, evaluate: see `oracle.enclosure`; row_count(case,
    key) is that of one block. output_shapes: name -> shape for a case.
    model: the outputs of one block, [r, c] each, as an honest kernel of the given contract computes them. width: how
    many numbers a row of a block reads of the longest array, by which large cases are sampled. needed: outputs that
    every target returns, in the dtype of its inputs (default: the first).
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Mapping[str, Any]
    blocks: Callable[[Case], list[tuple[int, ...]]]
    row_count: Callable[..., int]
    evaluate: Callable[[Arithmetic, Case, tuple[int, ...], Rows], Block]
    output_shapes: Callable[[Case], dict[str, tuple[int, ...]]]
    model: Callable[[Case, tuple[int, ...], Rows, Contract], dict[str, Float64Array]]
    width: Callable[[Case, tuple[int, ...]], int]
    needed: Callable[[Case], tuple[str, ...]] | None = None
    gradients_of: Mapping[str, str] = field(default_factory=dict)

    def required_outputs(self, case: Case) -> tuple[str, ...]:
        """Outputs that a call with this case must give."""
        return self.outputs[:1] if self.needed is None else self.needed(case)
