"""The catalogue names every property, and docs/properties.md is what it generates."""

from pathlib import Path

import pytest

import oracle
from oracle.ops.table import ops
from properties import catalogue
from properties.ops.table import properties_for

DOCS = Path(oracle.__file__).resolve().parent.parent / "docs"


def asked() -> set[str]:
    return {row.id for op in ops() for row in properties_for(op)}


def test_every_property_has_its_question_and_every_question_a_property() -> None:
    assert asked() == set(catalogue.QUESTIONS)
    assert all(question.endswith("?") for question in catalogue.QUESTIONS.values())


def test_the_page_is_generated() -> None:
    assert (DOCS / "properties.md").read_text(encoding="utf-8") == catalogue.as_markdown()


def test_a_question_without_a_property_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.QUESTIONS, "P99", "Is this asked?")
    assert asked() != set(catalogue.QUESTIONS)
    with pytest.raises(AssertionError):
        test_the_page_is_generated()
