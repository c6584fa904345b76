"""What is asked first kills the most for its cost, and the order leaves nothing out and asks nothing twice."""

from collections import Counter

import pytest

from benchmarks import kill_matrix
from oracle.ops.table import ops
from properties import order
from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.search import judge
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve
from targets.honest.table import HONEST
from targets.mutants.table import Mutant, mutants
from targets.probing.probes import probe

HOW = "run python benchmarks/kill_matrix.py"


def test_the_matrix_holds_every_mutant() -> None:
    held = {name for one in kill_matrix.load().values() for name in one.kills}
    assert held == {m.name for m in mutants()}, HOW


def test_the_table_follows_from_the_matrix() -> None:
    assert order.TABLE.read_text(encoding="utf-8") == kill_matrix.table(kill_matrix.load()), HOW


def test_the_first_look_kills_every_mutant_that_anything_cheap_kills() -> None:
    for op, one in kill_matrix.load().items():
        first = set(order.cover(one.costs, one.kills, limit=order.LIMIT))
        cheap = {m for m, keys in one.kills.items() if any(one.costs[key] <= order.LIMIT for key in keys)}
        assert {m for m, keys in one.kills.items() if first & set(keys)} == cheap, op


def test_few_questions_are_the_first() -> None:
    """A look at one kernel in one dtype is short: a small part of all its edge inputs, some tenths of a second."""
    for op, one in kill_matrix.load().items():
        first = order.cover(one.costs, one.kills, limit=order.LIMIT)
        assert len(first) <= max(4, len(one.costs) // 8), op
        assert sum(one.costs[key] for key in first) < 1.0, op


def killed_at_first_sight(row: Mutant) -> bool:
    dtype = next((d for d in kill_matrix.DTYPES if d in row.dtypes), row.dtypes[0])
    target = resolve(row.target, op=row.op)
    subject = subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILES["quick"])
    return any(
        judge(subject, part.prop, edge).verdict is Verdict.FAIL
        for part in order.parts(row.op, lambda prop: True)
        if part.first and not part.prop.missing(subject)
        for key, edge in order.keyed(part.prop, list(part.prop.edges(subject)))
        if part.asks(key)
    )


# One of each op, and what needs the last of attention's looks.
SAMPLE = {m.op: m for m in mutants()}


@pytest.mark.parametrize("op", SAMPLE)
def test_a_mutant_dies_at_first_sight(op: str) -> None:
    assert killed_at_first_sight(SAMPLE[op])


@pytest.mark.deep
@pytest.mark.parametrize("row", mutants(), ids=lambda row: row.name)
def test_every_mutant_dies_at_first_sight(row: Mutant) -> None:
    one = kill_matrix.load()[row.op]
    if any(one.costs[key] <= order.LIMIT for key in one.kills[row.name]):
        assert killed_at_first_sight(row)


@pytest.mark.parametrize("op", ops())
def test_every_edge_input_is_asked_once(op: str) -> None:
    honest = next(h for h in HONEST if h.op == op)
    subject = subject_for(resolve(honest.target, op=op), "fp32", profile=PROFILES["quick"])
    parts = order.parts(op, lambda prop: True)
    asked: Counter[str] = Counter()
    for prop in properties_for(op):
        for key, _ in order.keyed(prop, list(prop.edges(subject))):
            asked[key] += sum(part.asks(key) for part in parts if part.prop is prop)
    assert set(asked.values()) == {1}
    rest = [part.prop for part in parts if not part.first]
    assert len(rest) == len(properties_for(op)) and set(map(id, rest)) == set(map(id, properties_for(op)))


def test_the_first_looks_come_first() -> None:
    first = [part.first for part in order.parts("attention", lambda prop: True)]
    assert first == sorted(first, reverse=True) and first[0] and not first[-1]


def test_only_what_is_chosen_is_asked() -> None:
    parts = order.parts("attention", lambda prop: prop.id == "P9")
    assert {part.prop.id for part in parts} == {"P9"}


def test_a_greedy_cover_takes_the_best_for_its_cost() -> None:
    costs = {"a": 0.1, "b": 0.001, "c": 0.001, "dear": 9.0}
    kills = {"one": ["a", "b"], "two": ["a", "b"], "three": ["a", "c"], "four": ["dear"], "five": []}
    assert order.cover(costs, kills, limit=1.0) == ["b", "c"]
    assert order.cover({**costs, "b": 1.0, "c": 1.0}, kills, limit=1.0) == ["a"]
