"""The properties of rope, rope_backward, rope_apply, for every chosen target and dtype."""

from __future__ import annotations

import pytest

from properties.bench import Bench
from properties.plugin import Examination, check
from properties.record import Journal

OPS = (
    "rope",
    "rope_backward",
    "rope_apply",
)


def test_property(request: pytest.FixtureRequest, examination: Examination, bench: Bench, journal: Journal) -> None:
    check(request.config, bench, examination.prop, journal)
