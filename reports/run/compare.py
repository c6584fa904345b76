"""Two runs, record by record: what broke, what was cured, where the error grew or shrank, what is asked no more.

Runs are compared that were asked the same by the same libraries (`reports.run.asked`); the commit is what differs. A
question that one run did not ask counts as UNSUPPORTED there: not examined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from properties.judge.verdict import Verdict
from properties.record import Record
from reports.run.asked import refuse_unlike, whole_run
from reports.run.load import Run, UnlikeRuns
from reports.run.matching import Pair, pair

# A kernel that loses one bit of precision doubles its error.
ONE_BIT = 2.0
# From best to worst. Between VACUOUS and UNSUPPORTED a failure that is explained: it is examined at least.
_ORDER = (
    Verdict.PASS,
    Verdict.EXEMPT,
    Verdict.VACUOUS,
    Verdict.WAIVED,
    Verdict.UNSUPPORTED,
    Verdict.UNDECIDED,
    Verdict.STALE_WAIVER,
    Verdict.FAIL,
    Verdict.ERROR,
)
_NOT_ASKED = _ORDER.index(Verdict.UNSUPPORTED)
# The line of a run that sums up the records of one target.
_SUM = "contract"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from ``old`` to ``new``; every list from worst to least.

    old, new: the folders; commits: theirs. notes: what else differs, one line each. common: records in both runs.
    failures: broken now and not before, asked before or not. cured: the other way round. verdicts: other changes.
    grown, shrunk: same verdict, error/bound changed by more than ``factor``. gone, fresh: in one run only. inexact:
    smaller differences of error/bound, in any form, or another case. exact: whether any difference is one for the
    worse.
    """

    old: Path
    new: Path
    commits: tuple[str, str]
    notes: tuple[str, ...]
    common: int
    failures: tuple[Pair, ...]
    cured: tuple[Pair, ...]
    verdicts: tuple[Pair, ...]
    grown: tuple[Pair, ...]
    shrunk: tuple[Pair, ...]
    gone: tuple[Pair, ...]
    fresh: tuple[Pair, ...]
    inexact: tuple[Pair, ...]
    factor: float
    exact: bool

    @property
    def worse(self) -> int:
        """How many records are worse: broken, less well examined, grown in error, asked no more; any, if exact."""
        if self.exact:
            lists = (self.failures, self.cured, self.verdicts, self.grown, self.shrunk)
            return sum(map(len, (*lists, self.gone, self.fresh, self.inexact)))
        return len(self.failures) + len(self.grown) + sum(is_worse(p) for p in (*self.verdicts, *self.gone))


def compare(
    old: Path,
    new: Path,
    *,
    factor: float = ONE_BIT,
    exact: bool = False,
    across_versions: bool = False,
    common: bool = False,
) -> Comparison:
    """The records of the run in ``old`` against those of the run in ``new``.

    common: only questions that both asked (the sums of a run over its records, which choose other records, aside).
    factor: from 1. UnlikeRuns or DamagedRecords, in one line, if the two cannot be compared: see `reports.run.asked`.
    """
    if old.is_dir() and new.is_dir() and old.resolve() == new.resolve():
        raise UnlikeRuns(f"{old} and {new} are the same folder")
    before, after = whole_run(old), whole_run(new)
    notes = refuse_unlike(before, after, across_versions=across_versions, common=common)
    pairs = pair(before.records, after.records)
    if common:
        pairs = [p for p in pairs if p.old is not None and p.new is not None and p.record.property != _SUM]
        notes = (*notes, "only questions that both runs asked")
    both = [p for p in pairs if p.old is not None and p.new is not None]
    if not both:
        raise UnlikeRuns(f"{old} and {new} have no question in common")
    moved = [p for p in both if _rank(p.old) != _rank(p.new)]
    growth = [(p, change(p)) for p in both if _rank(p.old) == _rank(p.new)]
    alone = [p for p in pairs if p.old is None or p.new is None]
    broken = [p for p in (*moved, *alone) if _rank(p.old) <= _NOT_ASKED < _rank(p.new)]
    cured = [p for p in moved if _rank(p.new) < _NOT_ASKED < _rank(p.old)]
    listed = {id(p) for p in (*broken, *cured)}
    return Comparison(
        old,
        new,
        (_commit(before), _commit(after)),
        notes,
        len(both),
        _sorted(broken),
        _sorted(cured),
        _sorted(p for p in moved if id(p) not in listed),
        _sorted(p for p, c in growth if c > factor),
        _sorted(p for p, c in growth if c < 1 / factor)[::-1],
        _sorted(p for p in alone if p.new is None),
        _sorted(p for p in alone if p.old is None and id(p) not in listed),
        _sorted(p for p, c in growth if 1 / factor <= c <= factor and not _equal(p)),
        factor,
        exact,
    )


def is_worse(changed: Pair) -> bool:
    """Is a question answered less well than before?"""
    return _rank(changed.new) > _rank(changed.old)


def change(both: Pair) -> float:
    """new/old of error/bound: above 1 where it grew, inf from an exact result; 1 where a record has no figure.

    A ratio that is no number is beyond every bound.
    """
    assert both.old is not None and both.new is not None
    if both.old.ratio is None or both.new.ratio is None:
        return 1.0
    before, after = (math.inf if math.isnan(r) else r for r in (both.old.ratio, both.new.ratio))
    if before == after:
        return 1.0
    if before == 0 or after == math.inf:
        return math.inf
    return after / before if before < math.inf else 0.0


def _rank(record: Record | None) -> int:
    return _NOT_ASKED if record is None else _ORDER.index(Verdict(record.verdict))


def _equal(both: Pair) -> bool:
    """Same case, same figures to the last digit; nan equals itself here."""
    assert both.old is not None and both.new is not None
    return _figures(both.old) == _figures(both.new)


def _figures(r: Record) -> tuple[str, str, dict[str, str]]:
    return r.case, repr(r.ratio), {form: repr(ratio) for form, ratio in r.forms.items()}


def _sorted(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=_gravity))


def _gravity(p: Pair) -> tuple[float | str, ...]:
    """Sorts by how much worse the verdict is, then by how much the error grew, then by its size."""
    ratio = p.record.ratio
    size = 0.0 if ratio is None else math.inf if math.isnan(ratio) else ratio
    grown = change(p) if p.old is not None and p.new is not None else 1.0
    r = p.record
    return (_rank(p.old) - _rank(p.new), -_rank(p.new), -grown, -size, r.target, r.dtype, r.property, r.case)


def _commit(run: Run) -> str:
    noted = run.environments[0]
    return str(noted.get("commit") or "unknown")[:12] + (" with local changes" if noted.get("dirty") else "")
