"""Does a target take a call at all? Then every property of every chosen target, at each dtype: one test each."""

from __future__ import annotations

import pytest

from properties.examinations import Candidate, Examination
from properties.plugin import check, check_fit
from properties.record import Journal
from properties.subject import Subject


def test_fit(request: pytest.FixtureRequest, candidate: Candidate, journal: Journal) -> None:
    check_fit(request.node, candidate, journal)


def test_property(request: pytest.FixtureRequest, examination: Examination, subject: Subject, journal: Journal) -> None:
    check(request.node, subject, examination.part, journal)
