"""Every property of every chosen target, at each of its dtypes: one test each."""

from __future__ import annotations

import pytest

from properties.plugin import Examination, check
from properties.record import Journal
from properties.subject import Subject


def test_property(request: pytest.FixtureRequest, examination: Examination, subject: Subject, journal: Journal) -> None:
    check(request.config, subject, examination.prop, journal)
