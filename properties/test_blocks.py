"""The properties of whole attention blocks and of mla's gradients, for every chosen target and dtype."""

from __future__ import annotations

import pytest

from properties.bench import Bench
from properties.plugin import Examination, check
from properties.record import Journal

OPS = ("gqa_block", "mla_block", "mla_backward")


def test_property(request: pytest.FixtureRequest, examination: Examination, bench: Bench, journal: Journal) -> None:
    check(request.config, bench, examination.prop, journal)
