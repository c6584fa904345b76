"""Gate G6 for whole cases: which trivial output, if any, the bound of a case would have accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oracle.block import Block
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.error import Errors
from oracle.ops.table import op_named
from oracle.vacuity import trivial_outputs, vacuous

Part = tuple[Block, Mapping[str, Errors], Mapping[str, Bounded]]


def trivially_accepted(case: Case, parts: Sequence[Part]) -> str:
    """Names of wrong trivial outputs that every bound of the case accepts, joined; an empty string if the check means
    something."""
    names = [n for n in dict.fromkeys(n for _, errors, _ in parts for n in errors) if n != "lse"]
    found = [_accepted(case, parts, name) for name in names]
    # Where one output cannot be trivial the case means something.
    return ", ".join(dict.fromkeys(name for accepted in found for name in accepted)) if all(found) else ""


def _accepted(case: Case, parts: Sequence[Part], output: str) -> tuple[str, ...]:
    judged = [(block, errors[output], bounds[output].bound) for block, errors, bounds in parts if output in errors]
    shaped, op = [], op_named(case.op)
    for block, errors, bound in judged:
        rows = ~(block.empty | block.undefined)
        exact = errors.enclosure.rows(rows)
        own = op.trivial(case, block) if output == op.outputs[0] else {}
        others = {name: e.rows(rows) for name, e in own.items()}
        shaped.append((exact, np.broadcast_to(bound, errors.absolute.shape)[rows], trivial_outputs(exact, others)))
    return vacuous(shaped, judged[0][1].fmt)
