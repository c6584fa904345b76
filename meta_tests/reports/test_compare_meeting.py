"""Which records of two runs meet: those that ask the same question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from meta_tests.reports.synthetic import PASSED
from meta_tests.reports.two_runs import EDGE, LOST, OTHER
from properties.record import Record
from reports.run.matching import pair


def met(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, str]]:
    """Details of the records of each pair, that of the older one first."""
    return sorted((p.old.detail if p.old else "", p.new.detail if p.new else "") for p in pair(old, new))


def test_the_same_case_meets_itself_in_any_order() -> None:
    records = [replace(r, detail=r.case) for r in (EDGE, OTHER, PASSED)]
    assert met(records, records[::-1]) == sorted((r.case, r.case) for r in records)


@pytest.mark.parametrize("name", ["target", "origin", "op", "dtype", "device", "property"])
def test_records_of_another_subject_do_not_meet(name: str) -> None:
    assert [p.old is None or p.new is None for p in pair([PASSED], [replace(PASSED, **{name: "another"})])] == [
        True
    ] * 2


def test_other_features_of_a_case_and_another_title_keep_the_question() -> None:
    assert len(pair([EDGE], [replace(EDGE, features={"edge": "renamed"})])) == 1
    assert len(pair([EDGE], [replace(EDGE, title="another title")])) == 1
    assert len(pair([EDGE], [replace(EDGE, case="another digest")])) == 1
    assert len(pair([EDGE], [replace(EDGE, case="another digest", features={"edge": "another"})])) == 2


def test_two_properties_of_one_number_stay_apart() -> None:
    twin = replace(EDGE, title="another title", detail="twin")
    assert met([EDGE, twin], [twin, EDGE]) == sorted([(EDGE.detail, EDGE.detail), ("twin", "twin")])


def test_a_search_whose_worst_case_moved_is_one_question() -> None:
    moved = replace(PASSED, case="another digest", features={"sk": 3}, description="smaller")
    assert len(pair([EDGE, PASSED], [EDGE, moved])) == 1 + 1
    # A search of a single draw is told by its place, behind the fixed inputs.
    single = replace(PASSED, examples=1)
    assert len(pair([EDGE, single], [EDGE, replace(moved, examples=1)])) == 1 + 1


def test_searches_of_one_property_meet_by_title() -> None:
    one, other = replace(PASSED, title="one", detail="one"), replace(PASSED, title="other", detail="other")
    moved = [replace(r, case=f"moved {i}", description="", features={"i": i}) for i, r in enumerate((other, one))]
    assert met([one, other], moved) == [("one", "one"), ("other", "other")]


def test_a_fixed_input_that_was_replaced_does_not_pass_for_the_old_one() -> None:
    assert len(pair([EDGE], [OTHER])) == 2
    assert len(pair([EDGE], [replace(PASSED, case="drawn", features={"sk": 3}, description="drawn")])) == 2


def test_a_lost_call_meets_the_question_that_it_was_made_for() -> None:
    assert len(pair([EDGE, OTHER], [LOST, OTHER])) == 2
    drawn = replace(LOST, features={"sk": 12345}, description="a drawn one")
    assert len(pair([EDGE, PASSED], [EDGE, drawn])) == 2


def test_records_of_one_key_meet_in_order_and_none_is_lost() -> None:
    old = [replace(EDGE, detail=f"old {i}") for i in range(3)]
    new = [replace(EDGE, detail=f"new {i}") for i in range(2)]
    assert met(old, new) == [("old 0", "new 0"), ("old 1", "new 1"), ("old 2", "")]
    assert met(new, old) == [("", "old 2"), ("new 0", "old 0"), ("new 1", "old 1")]


def test_features_tell_records_of_one_case_apart() -> None:
    one, other = (replace(EDGE, features={"edge": "e", "mask": m}, detail=m) for m in ("heads", "sequences"))
    assert met([one, other], [other, one]) == [("heads", "heads"), ("sequences", "sequences")]
    assert met([one, other], [other]) == [("heads", ""), ("sequences", "sequences")]
