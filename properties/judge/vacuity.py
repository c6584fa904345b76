"""Gate G6 for whole cases: which trivial output, if any, the bound of a case would have accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oracle.block import Block
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.enclosure import Enclosure
from oracle.error import Errors
from oracle.ops.layouts import case as attention_layouts
from oracle.ops.rope.case import turned_array
from oracle.vacuity import exactly, mean_of_visible, trivial_outputs, uniform_rows, vacuous

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
    shaped = []
    for block, errors, bound in judged:
        rows = ~(block.empty | block.undefined)
        exact = errors.enclosure.rows(rows)
        own = _others(case, block) if output in ("out", "dx") else {}
        others = {name: e.rows(rows) for name, e in own.items()}
        shaped.append((exact, np.broadcast_to(bound, errors.absolute.shape)[rows], trivial_outputs(exact, others)))
    return vacuous(shaped, judged[0][1].fmt)


def _others(case: Case, block: Block) -> dict[str, Enclosure]:
    if case.op in attention_layouts.NAMES:
        return _others(attention_layouts.dense(case, block.key[0]), replace(block, key=(0, block.key[1])))
    if case.op == "attention":
        batch, head = block.key
        v = case.arrays["v"]
        group = case.arrays["q"].shape[1] // v.shape[1]
        return {"the mean of V": mean_of_visible(block.visible_keys(), v[batch, head // group])}
    if case.op == "softmax" and block.visible is not None:
        return {"the uniform row": uniform_rows(block.visible)}
    if case.op in ("rope", "rope_backward", "rope_apply"):
        return {"the unrotated input": exactly(turned_array(case)[block.key][block.rows])}
    return {}
