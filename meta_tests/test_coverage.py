"""An op needs a formula, a bound, inputs, properties, a mutant and an honest variant; what is missing is named here."""

from collections.abc import Callable

import pytest

from oracle.bounds.table import bounds_of
from oracle.evaluate import enclose
from oracle.formats import format_of
from oracle.ops.contracts import default_preset, ladder, preset_forms
from oracle.ops.table import ops
from properties.ops.table import properties_for
from properties.property import Property
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.gradient import with_gradients
from targets.calling.registry import BUILTINS, Unavailable, load_builtin, resolve
from targets.calling.target import Target
from targets.honest.table import HONEST
from targets.mutants.table import mutants
from targets.probing.tiny import tiny_case

OPS = tuple(ops())


def _edges(op: str) -> bool:
    return any(list(p.edges(_subject(op))) for p in properties_for(op))


# What every op must have, as questions whose answer is no (or an exception) where it is missing.
NEEDS: dict[str, Callable[[str], object]] = {
    "formula": lambda op: enclose(tiny_case(op, "fp32")),
    "model kernel": lambda op: _model(op),
    "derived bound": lambda op: _bounded(op),
    "contract preset for every dtype": lambda op: all(
        preset_forms(op, default_preset(op, d)) for d in ops()[op].formats
    ),
    "property": lambda op: properties_for(op),
    "edge inputs": lambda op: _edges(op),
    "search strategy": lambda op: any(p.search is not None for p in properties_for(op)),
    # A gradient's own is P14.
    "bound property P1": lambda op: any(p.id in ("P1", "P14") for p in properties_for(op)),
    "mutant": lambda op: [m for m in mutants() if m.op == op],
    "honest variant": lambda op: [h for h in HONEST if h.op == op],
}


def missing(op: str) -> list[str]:
    found = []
    for what, ask in NEEDS.items():
        try:
            there = bool(ask(op))
        except (LookupError, ValueError, AttributeError) as error:
            found.append(f"{what} ({type(error).__name__}: {error})")
        else:
            found += [] if there else [what]
    return found


def _model(op: str) -> object:
    case, row = tiny_case(op, "fp32"), ops()[op]
    block = enclose(case)[0]
    form = preset_forms(op, default_preset(op, "fp32"))[0]
    return row.model(case, block.key, block.rows, form)[row.outputs[0]].size


def _bounded(op: str) -> bool:
    case = tiny_case(op, "fp32")
    block = enclose(case)[0]
    forms = preset_forms(op, default_preset(op, "fp32"))
    formats = {n: format_of(case.arrays[ops()[op].inputs[0]]) for n in ops()[op].outputs}
    bound = bounds_of(op)(case, block, forms, formats)[0][ops()[op].outputs[0]].bound
    return bool((bound > 0).all() and (bound < 1).all())


def _subject(op: str) -> Subject:
    row = [h for h in HONEST if h.op == op][0]  # noqa: RUF015 - without one, an IndexError says so
    return subject_for(resolve(row.target), "fp32", profile=PROFILES["quick"])


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_everything(op: str) -> None:
    assert missing(op) == [], f"{op} has no {', no '.join(missing(op))}"


@pytest.mark.parametrize("what", NEEDS)
def test_what_is_missing_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question can be answered with no: an op from which its subject is taken away."""
    op = "softmax"
    take = {
        "formula": ("meta_tests.test_coverage.enclose", lambda case: []),
        "model kernel": ("meta_tests.test_coverage._model", lambda op: 0),
        "derived bound": ("meta_tests.test_coverage._bounded", lambda op: False),
        "contract preset for every dtype": ("meta_tests.test_coverage.preset_forms", lambda op, preset: ()),
        "property": ("meta_tests.test_coverage.properties_for", lambda op: ()),
        "edge inputs": ("meta_tests.test_coverage.properties_for", lambda op: ()),
        "search strategy": ("meta_tests.test_coverage.properties_for", lambda op: ()),
        "bound property P1": ("meta_tests.test_coverage.properties_for", lambda op: ()),
        "mutant": ("meta_tests.test_coverage.mutants", lambda: ()),
        "honest variant": ("meta_tests.test_coverage.HONEST", ()),
    }
    assert missing(op) == []
    monkeypatch.setattr(*take[what])
    assert any(text.startswith(what) for text in missing(op))


def rows() -> list[Property]:
    return [p for op in OPS for p in properties_for(op)]


def test_each_table_is_about_known_ops_and_has_no_double_rows() -> None:
    for op in OPS:
        table = properties_for(op)
        assert len({(p.id, p.title) for p in table}) == len(table), op
        for dtype in ops()[op].formats:
            assert set(ladder(op, dtype)) <= set(ops()[op].presets.forms), op
    assert {p.id for p in rows()} >= {"P1", "P9", "P10", "P14", "P15", "P18", "P21", "P23"}


def test_a_property_can_be_asked() -> None:
    for op in OPS:
        for p in properties_for(op):
            assert p.search is not None or list(p.edges(_subject(op))), f"{op} {p.id} ({p.title}) has no input"


def test_a_mutant_is_killed_by_a_property_of_its_op() -> None:
    for m in mutants():
        assert m.killed_by in {p.id for p in properties_for(m.op)}, f"{m.name}: {m.op} has no {m.killed_by}"
        assert set(m.dtypes) <= set(ops()[m.op].formats), m.name


def test_every_op_has_a_built_in_target_or_a_reason_why_not() -> None:
    found: dict[str, list[Target]] = {op: [] for op in OPS}
    for builtin in BUILTINS:
        try:
            target = load_builtin(builtin)
        except Unavailable:
            continue
        for one in with_gradients([target]):
            found[one.op].append(one)
    # The rotation alone is a part of kernels, not one that anybody ships by itself.
    assert [op for op, names in found.items() if not names] in ([], ["rope_apply"])
