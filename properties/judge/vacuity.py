"""Gate G6 for whole cases: which trivial output, if any, the bound of a case would have accepted."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.case import Case
from oracle.ops.table import op_named
from oracle.vacuity import VacuityPart, trivial_outputs, vacuous
from properties.judge.weigh import Weighed


def trivially_accepted(case: Case, weighed: Weighed, form: int) -> str:
    """Names of wrong trivial outputs that every bound of the case accepts, joined; an empty string if the check means
    something."""
    found: list[str] = []
    for name, pool in weighed.pools.items():
        accepted = () if name == "lse" else vacuous(_parts(case, weighed, name, form), pool.errors.fmt)
        # Where one output cannot be trivial the case means something.
        if not accepted and name != "lse":
            return ""
        found += accepted
    return ", ".join(dict.fromkeys(found))


def _parts(case: Case, weighed: Weighed, output: str, form: int) -> Iterator[VacuityPart]:
    op, pool = op_named(case.op), weighed.pools[output]
    for index, start, stop in pool.parts:
        rows = pool.live[start:stop]
        own = op.trivial(case, weighed.blocks[index]) if output == op.outputs[0] else {}
        exact = pool.errors.enclosure.rows(slice(start, stop)).rows(rows)
        others = {name: e.rows(rows) for name, e in own.items()}
        yield exact, pool.bounds[form, start:stop][rows], trivial_outputs(exact, others)
