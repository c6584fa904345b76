"""What the engine leaves out, and what counts as the trace of a stage that rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oracle.case import Case
from oracle.formats import FORMATS
from properties.diagnosis import engine
from properties.diagnosis.counterfactual import Counterfactual, Hypothesis, Table
from properties.diagnosis.engine import diagnose, table_of
from properties.diagnosis.match import Match
from properties.subject import PROFILES, subject_for
from targets.calling.target import target_from


def match_of(observed: list[float], predicted: list[float], *, odd: bool = False) -> Match:
    forms = np.ones(1, dtype=bool)
    errors = np.array(observed), np.array(predicted), np.ones(len(observed)), np.zeros(len(observed), dtype=bool)
    return Match(forms, forms, odd=odd, errors=[("out", *errors)])


def test_errors_are_in_reach_of_the_bound_and_twice_the_largest_simulated_one() -> None:
    assert match_of([4.9, -4.9], [2.0, 0.0]).in_reach()
    assert not match_of([5.1, 0.0], [2.0, 0.0]).in_reach()
    assert not match_of([0.0, -1.1], [0.0, 0.0]).in_reach()


def test_what_is_no_number_against_the_simulation_is_out_of_reach() -> None:
    assert not match_of([0.0], [0.0], odd=True).in_reach()


@pytest.mark.parametrize("wanted", ["the output were zeros", "nothing of the kind"])
def test_no_defect_is_asked_about_after_one_that_nothing_could_be_preferred_to(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    asked: list[str] = []
    table = table_of("softmax")

    def watched(row: Hypothesis) -> Hypothesis:
        def imagine(failing: engine.FailingCase) -> list[Counterfactual]:
            asked.append(row.name)
            return [c for c in row.imagine(failing) if row.name != "zeros" or c.sentence == wanted]

        return replace(row, imagine=imagine)

    rows = tuple(watched(row) for row in table.hypotheses)
    monkeypatch.setitem(engine.TABLES, "softmax", Table(rows, table.related, table.ranges, table.wider))

    def zeros(x: object) -> object:
        return x * 0  # type: ignore[operator]

    zeros.__attn_oracle__ = {"op": "softmax"}  # type: ignore[attr-defined]
    subject = subject_for(target_from(zeros, spec="made:here", op="softmax"), "fp32", profile=PROFILES["quick"])
    x = FORMATS["fp32"].store(np.random.default_rng(4).standard_normal((3, 40)))
    found = diagnose(subject, Case("softmax", {"x": x}))
    assert (found == f"as if {wanted}") == (wanted == "the output were zeros")
    # The rest of the table is asked about where nothing settles it.
    assert (asked[-1] == "zeros") == (wanted == "the output were zeros")
