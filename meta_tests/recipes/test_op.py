"""CONTRIBUTING's recipe for an op, followed in a temporary copy of the product with a toy op: y = 2 x."""

from __future__ import annotations

from pathlib import Path

import pytest

from meta_tests.recipes.following import Recipe, assert_follows, assert_named, row, section

MOST_NEW, MOST_EDITED = 8, 4

FORMULA = '''"""double (a toy): y = x + x. x [R, n]; NaN and infinities are undefined."""

from oracle.arithmetic.base import Arithmetic, V


def double(ar: Arithmetic[V], x: V) -> V:
    return ar.round(ar.add(x, x), "output")
'''
CASE = '''"""double as a case: x [..., n] in, out of its shape."""

import numpy as np

from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.block import Block
from oracle.contract import presets
from oracle.formats import FORMATS, format_of
from oracle.ops.double.formula import double
from oracle.ops.op import Array, Op


def count(case, key=()):
    return case.arrays["x"].size // case.arrays["x"].shape[-1]


def evaluate(ar, case, key, rows):
    x = case.arrays["x"].reshape(count(case), -1)[rows].astype(np.float64)
    lost = ~np.isfinite(x).all(axis=1)
    out = double(ar, ar.const(np.where(lost[:, None], 0.0, x)))
    return Block(key, rows, ar, {"out": out}, np.zeros(len(rows), dtype=bool), lost)


def model(case, key, rows, contract):
    ar = RoundedArithmetic(FORMATS["fp64"], {"output": format_of(case.arrays["x"])})
    with ar.working():
        return {"out": ar.to_enclosure(evaluate(ar, case, key, rows).values["out"])[0]}


OPS = (
    Op(
        name="double",
        family="softmax",
        presets=presets.SOFTMAX,
        arrays={"x": Array("... n")},
        results={"out": "... n"},
        options={},
        blocks=lambda case: [()],
        row_count=count,
        evaluate=evaluate,
        output_shapes=lambda case: {"out": case.arrays["x"].shape},
        model=model,
        width=lambda case, key: case.arrays["x"].shape[-1],
    ),
)
'''
BOUND = '''"""The bound of double: the sum is exact but for its overflow, so one rounding of the output."""

import numpy as np

from oracle.bounds.bounded import Bounded


def bounds(case, block, forms, formats):
    size = np.abs(block.part("out").hi)
    fmt = formats["out"]
    bound = fmt.unit_roundoff * size + fmt.omega
    return [{"out": Bounded(bound, size >= fmt.overflow_threshold)} for _ in forms]
'''
TABLE = '''"""What is asked of double."""

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.judge.judgements import within_bound
from properties.property import Property
from properties.subject import Input


def _rows(subject, seed):
    x = np.random.default_rng(seed).standard_normal((2, 5))
    return Input(Case("double", {"x": subject.fmt.store(x)}), {"seed": seed})


PROPERTIES = (
    Property(
        "P1",
        "error within the contract's bound",
        within_bound,
        search=lambda subject: st.integers(0, 9).map(lambda seed: _rows(subject, seed)),
        edges=lambda subject: [_rows(subject, 0)],
    ),
)
'''
HONEST = '''"""double in plain torch."""

from torch import Tensor

from targets.honest.describe import describe


@describe("double")
def double(x: Tensor) -> Tensor:
    return x + x
'''
MUTANT = '''"""double with a defect."""

import torch
from torch import Tensor

from targets.mutants.mutant import mutant


@mutant("double", "P1", "It triples.", smallest=lambda dtype: {"x": torch.ones(1, 1, dtype=dtype)})
def triple(x: Tensor) -> Tensor:
    return 3 * x
'''
NEW = {
    "oracle/ops/double/__init__.py": '"""double."""\n',
    "oracle/ops/double/formula.py": FORMULA,
    "oracle/ops/double/case.py": CASE,
    "oracle/bounds/softmax/double.py": BOUND,
    "properties/ops/double/__init__.py": '"""double."""\n',
    "properties/ops/double/table.py": TABLE,
    "targets/honest/double.py": HONEST,
    "targets/mutants/softmax/double.py": MUTANT,
}
EDITED = {
    "oracle/ops/table.py": row(
        "_OPS", "from oracle.ops.double import case as double_case", "        *rope_case", "        *double_case.OPS,"
    ),
    "oracle/bounds/table.py": row(
        "Bounds", "from oracle.bounds.softmax import double", '    "rope"', '    "double": double.bounds,'
    ),
    "properties/ops/table.py": row(
        "_TABLES",
        "from properties.ops.double.table import PROPERTIES as DOUBLE",
        '    "rope"',
        '    "double": DOUBLE,',
    ),
    "targets/honest/table.py": row(
        "HONEST", "", '    _flash("tile_16"', '    _other("double", "double", "double:double", "x + x"),'
    ),
}

CHECK = """
from meta_tests.test_coverage import missing
from properties.ops.table import properties_for
from properties.search import hunt
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve

assert missing("double") == [], missing("double")

def verdicts(spec):
    # The op is read from what the function declares.
    subject = subject_for(resolve(spec), "bf16", profile=PROFILES["quick"])
    return {record.verdict for row in properties_for("double") for record in hunt(subject, row)}

assert verdicts("targets.honest.double:double") == {"PASS"}, verdicts("targets.honest.double:double")
assert verdicts("targets.mutants.softmax.double:triple") == {"FAIL"}
print("follows")
"""


RECIPE = Recipe(NEW, EDITED, CHECK)


def test_an_op_is_added_by_following_the_recipe(tmp_path: Path) -> None:
    assert len(NEW) <= MOST_NEW and len(EDITED) <= MOST_EDITED
    assert_follows(RECIPE, tmp_path)


@pytest.mark.parametrize(
    ("step", "said"), [("oracle/bounds/table.py", "derived bound"), ("targets/mutants/softmax/double.py", "mutant")]
)
def test_a_step_left_out_is_named(step: str, said: str, tmp_path: Path) -> None:
    assert_named(RECIPE, tmp_path, step, said)


def test_the_recipe_names_every_file() -> None:
    recipe = section("Add an op")
    for place in RECIPE.places:
        named = place.replace("/ops/double/", "/ops/<op>/").replace("double.py", "<op>.py")
        named = named.replace("/softmax/", "/<family>/")
        assert ("and `table.py`" if named == "properties/ops/<op>/table.py" else named) in recipe, named
