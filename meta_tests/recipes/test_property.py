"""CONTRIBUTING's recipe for a property, followed with a toy property of attention: O is odd in V, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from meta_tests.recipes.following import Recipe, assert_follows, assert_named, row, section

CHECKED = '''"""O is odd in V: every rounding is symmetric about zero."""

import numpy as np
from hypothesis import strategies as st

from properties.checks.metamorphic import observe, same_bits
from properties.inputs import strategies


def odd(subject, example):
    """P30: with -V the output is -O, bit by bit."""
    case = example.case
    other = case.with_arrays(v=-case.arrays["v"])
    there = observe(subject, other)["out"].astype(np.float64)
    return same_bits(observe(subject, case)["out"], -there, np.array(True), what="the output of -V")


def general(subject):
    return strategies.attention(subject, largest_k=24)


def edges(subject):
    yield strategies.attention_input(subject, sq=3, sk=40, features={"edge": "plain"})
'''
MUTANT = '''"""Attention that is not odd in V."""

from torch import Tensor

from targets.honest.flash import attention
from targets.mutants.attention.inputs import TWO_KEYS, ZERO, one_head
from targets.mutants.mutant import mutant


@mutant("attention", "P30", "Outputs are rounded away from minus infinity.", smallest=one_head(ZERO, *TWO_KEYS))
def rounded_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v)
    return out + out.abs() / 64
'''
NEW = {"properties/ops/attention/odd.py": CHECKED, "targets/mutants/attention/odd.py": MUTANT}
EDITED = {
    "properties/ops/attention/table.py": row(
        "EXCLUSION",
        "from properties.ops.attention import odd",
        '    Property("G3"',
        '    Property("P30", "the output is odd in V", odd.odd, search=odd.general, edges=odd.edges),',
    ),
    "properties/catalogue.py": [('    "G3": ', '    "P30": "Is the output odd in V?",\n    "G3": ')],
}
CHECK = """
from meta_tests.properties.test_catalogue import test_every_property_has_its_question_and_every_question_a_property
from meta_tests.properties.test_mutants import test_every_property_of_attention_kills_one
from properties.ops.table import properties_for
from properties.search import hunt
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve

test_every_property_has_its_question_and_every_question_a_property()
test_every_property_of_attention_kills_one()
odd = [row for row in properties_for("attention") if row.id == "P30"]
assert odd, "P30 is in no table"

def verdicts(spec):
    subject = subject_for(resolve(spec), "bf16", profile=PROFILES["quick"])
    return [record.verdict for record in hunt(subject, odd[0])]

assert verdicts("targets.honest.flash:attention") == ["PASS", "PASS"]
assert verdicts("targets.mutants.attention.odd:rounded_up") == ["FAIL", "FAIL"]
print("follows")
"""
RECIPE = Recipe(NEW, EDITED, CHECK)


def test_a_property_is_added_by_following_the_recipe(tmp_path: Path) -> None:
    assert_follows(RECIPE, tmp_path)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("properties/ops/attention/table.py", "every_question_a_property"),
        ("properties/catalogue.py", "every_property_has_its_question"),
        ("targets/mutants/attention/odd.py", "test_every_property_of_attention_kills_one"),
    ],
)
def test_a_step_left_out_is_named(step: str, said: str, tmp_path: Path) -> None:
    assert_named(RECIPE, tmp_path, step, said)


def test_the_recipe_names_every_file() -> None:
    recipe = section("Add a property")
    for place in (*RECIPE.places, "docs/properties.md"):
        named = place.replace("odd.py", "<topic>.py").replace("/attention/", "/<op>/")
        assert named in recipe, named
