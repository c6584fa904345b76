"""CONTRIBUTING's recipe for an option, followed with a toy option of attention: a temperature divides the scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from meta_tests.recipes.following import Recipe, assert_follows, assert_named, section

MOST = 8

HONEST = '''"""Attention with a temperature: scores are divided by it."""

from torch import Tensor

from targets.honest.describe import describe
from targets.honest.flash import Result, attention


@describe("attention")
def tempered(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, temp: float | None = None, return_lse: bool = False
) -> Result:
    scale = (temp or 1.0) ** -1 * q.shape[-1] ** -0.5
    return attention(q, k, v, scale=scale, is_causal=is_causal, return_lse=return_lse)
'''
MUTANT = '''"""A temperature with a defect."""

from torch import Tensor

from targets.honest.flash import Result
from targets.honest.tempered import tempered
from targets.mutants.attention.inputs import TWO_KEYS, ZERO, one_head
from targets.mutants.mutant import mutant


@mutant("attention", "P17", "A temperature is ignored.", smallest=one_head(ZERO, *TWO_KEYS, temp=2.0))
def temperature_ignored(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, temp: float | None = None, return_lse: bool = False
) -> Result:
    return tempered(q, k, v, is_causal=is_causal, return_lse=return_lse)


@mutant("attention", "P17", "A temperature is halved.", smallest=one_head(ZERO, *TWO_KEYS, temp=2.0))
def temperature_halved(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, temp: float | None = None, return_lse: bool = False
) -> Result:
    return tempered(q, k, v, is_causal=is_causal, temp=temp and temp / 2, return_lse=return_lse)
'''
OPTION = '    Option("temperature", check=positive, aliases=("temp",), lacking=frozenset({"gradient"})),\n'
ROW = '    _other("tempered", "attention", "tempered:tempered", "a temperature in the scale"),\n'
TRIED = """    Tried(
        "temperature",
        "the temperature",
        (2.0, 0.5, 0.75),
        edges={
            "matter": (4.0, 0.3),
            "decode": (2.0,),
            "sums": (0.5,),
            "all": (2.0,),
            "small": (2.0,),
            "packed": (2.0,),
        },
        others=lambda case: iter(
            [("the temperature were halved", case.with_options(temperature=case.options["temperature"] / 2))]
        ),
        symmetric=True,
    ),
"""
DIVIDED = """def scale_value(ar: Arithmetic[V], case: Case) -> V:
    t, scale = case.options.get("temperature"), _scale_value(ar, case)
    return scale if t is None else ar.div(scale, ar.const(np.array([[t]])))


def scale_float(case: Case) -> float:
    return _scale_float(case) / (case.options.get("temperature") or 1.0)


"""
NEW = {"targets/honest/tempered.py": HONEST, "targets/mutants/attention/temperature.py": MUTANT}
EDITED = {
    "oracle/ops/attention/options.py": [
        (
            '    _descale("q"),\n',
            f'{OPTION}    _descale("q"),\n',
        ),
    ],
    "oracle/ops/attention/case.py": [
        ("def scale_float(", "def _scale_float("),
        ("def scale_value(", f"{DIVIDED}def _scale_value("),
    ],
    # One more constant in the scale, as with factors.
    "oracle/bounds/attention/head.py": [("for name in DESCALES)", 'for name in (*DESCALES, "temperature"))')],
    "properties/ops/attention/options.py": [(")  # fmt: skip\nTRIED", f"{TRIED})  # fmt: skip\nTRIED")],
    "targets/honest/table.py": [
        (
            '    _flash("tile_16"',
            f'{ROW}    _flash("tile_16"',
        )
    ],
}
CHECK = """
from meta_tests.test_option_coverage import OPTIONS, missing
from properties.ops.table import properties_for
from properties.search import hunt
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve

assert "temperature" in OPTIONS, "no row of the table of options"
assert missing("temperature") == [], missing("temperature")

def records(spec, *ids):
    subject = subject_for(resolve(spec), "bf16", profile=PROFILES["quick"])
    rows = [row for row in properties_for("attention") if row.id in ids]
    return [record for row in rows for record in hunt(subject, row)]

found = records("targets.honest.tempered:tempered", "P8", "P10", "P17")
assert {record.verdict for record in found} == {"PASS"}, [r for r in found if r.verdict != "PASS"]
assert any("temperature" in record.features for record in found)
for defect in ("ignored", "halved"):
    failed = records(f"targets.mutants.attention.temperature:temperature_{defect}", "P17")
    said = {record.diagnosis for record in failed if record.verdict == "FAIL"}
    assert f"as if the temperature were {defect}" in said, said
print("follows")
"""
RECIPE = Recipe(NEW, EDITED, CHECK)


def test_an_option_is_added_by_following_the_recipe(tmp_path: Path) -> None:
    assert len(RECIPE.product) <= MOST
    assert_follows(RECIPE, tmp_path)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("oracle/ops/attention/case.py", "'meaning'"),
        ("properties/ops/attention/options.py", "row that says how it is tried"),
        ("targets/mutants/attention/temperature.py", "mutant"),
    ],
)
def test_a_step_left_out_is_named(step: str, said: str, tmp_path: Path) -> None:
    assert_named(RECIPE, tmp_path, step, said)


def test_the_recipe_names_every_file() -> None:
    recipe = section("Add an option")
    for place in RECIPE.places:
        named = place.replace("tempered.py", "<name>.py").replace("temperature.py", "<option>.py")
        assert named in recipe, named
