"""Records of two runs that answer the same question, side by side."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from properties.judge.verdict import Verdict
from properties.record import Record

_Key = tuple[str, ...]
# What names an input of a fixed list; a drawn one has none of them.
_FIXED = ("edge", "sweep", "real")


@dataclass(frozen=True, slots=True)
class Pair:
    """One question in two runs; None where a run did not ask it."""

    old: Record | None
    new: Record | None

    @property
    def record(self) -> Record:
        """What names the question: the newer record, or the only one."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A record, its features in one order, and whether it can be the one that a search gives."""

    record: Record
    features: str
    drawn: bool


def pair(old: Iterable[Record], new: Iterable[Record]) -> list[Pair]:
    """Every record of both runs, in one pair.

    Tried in this order, each on what the ones before left over: the same case, made in the same way; the same case;
    a case made in the same way (its values or the property's title changed, or the call was lost and has neither
    digest nor title); the search of a property, whose nearest case may be another one; a search and a call that was
    lost in it. Several records of one key are paired in the order in which they were asked.

    A search may end on another case though nothing of its own changed: Hypothesis draws now and then a constant of the
    loaded modules, which other modules or another number of workers change.
    """
    left, right = _asked(old), _asked(new)
    pairs: list[Pair] = []
    for key in _KEYS:
        waiting: dict[_Key, deque[_Asked]] = defaultdict(deque)
        for one in right:
            found = key(one)
            if found is not None:
                waiting[found].append(one)
        unmatched, taken = [], set()
        for one in left:
            found = key(one)
            if found is not None and waiting.get(found):
                other = waiting[found].popleft()
                taken.add(id(other))
                pairs.append(Pair(one.record, other.record))
            else:
                unmatched.append(one)
        left, right = unmatched, [one for one in right if id(one) not in taken]
    return [*pairs, *(Pair(one.record, None) for one in left), *(Pair(None, one.record) for one in right)]


def _asked(records: Iterable[Record]) -> list[_Asked]:
    listed = list(records)
    # The search of a property comes after its fixed inputs.
    last = {(*_subject(r), r.title): index for index, r in enumerate(listed)}
    return [
        _Asked(
            r,
            json.dumps(r.features, sort_keys=True, default=str),
            r.examples > 1 or (last[(*_subject(r), r.title)] == index and not any(n in r.features for n in _FIXED)),
        )
        for index, r in enumerate(listed)
    ]


def _subject(r: Record) -> _Key:
    return (r.target, r.origin, r.op, r.dtype, r.device, r.property)


def _same_making(one: _Asked) -> _Key | None:
    return (*_subject(one.record), one.record.title, one.record.case, one.features)


def _same_case(one: _Asked) -> _Key | None:
    return (*_subject(one.record), one.record.title, one.record.case) if one.record.case else None


def _made_alike(one: _Asked) -> _Key | None:
    return (*_subject(one.record), one.features, one.record.description)


def _search(one: _Asked) -> _Key | None:
    return (*_subject(one.record), one.record.title) if one.drawn and one.record.case else None


def _search_or_lost(one: _Asked) -> _Key | None:
    lost = not one.record.case and one.record.verdict == Verdict.ERROR.value
    return _subject(one.record) if (one.drawn and one.record.case) or lost else None


_KEYS: Sequence[Callable[[_Asked], _Key | None]] = (_same_making, _same_case, _made_alike, _search, _search_or_lost)
