"""What was made last of a case: once while it is held, again when it went, and never more held than allowed."""

import numpy as np

from oracle.case import Case
from oracle.recent import Recent


def case(n: int) -> Case:
    return Case("softmax", {"x": np.full((1, n), 1.0)})


def test_a_result_is_made_once_for_one_case_and_question() -> None:
    kept, made, one = Recent(10), [], case(1)
    for _ in range(2):
        kept.of(one, "a", 3, lambda: made.append("a"))
    kept.of(one, "b", 3, lambda: made.append("b"))
    # Equal is not the same: results are kept by identity.
    kept.of(case(1), "a", 3, lambda: made.append("a"))
    assert made == ["a", "b", "a"]


def test_the_oldest_go_first_and_what_was_used_last_stays() -> None:
    kept, made, cases = Recent(10), [], [case(n) for n in range(1, 5)]
    for at in (0, 1, 0, 2, 0, 3, 0, 1):
        kept.of(cases[at], "x", 5, lambda at=at: made.append(at))
    assert made == [0, 1, 2, 3, 1]


def test_what_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    kept, made, one, other = Recent(10), [], case(1), case(2)
    kept.of(one, "x", 10, lambda: made.append("one"))
    for _ in range(2):
        kept.of(other, "x", 11, lambda: made.append("other"))
    kept.of(one, "x", 10, lambda: made.append("one"))
    assert made == ["one", "other", "other"]
