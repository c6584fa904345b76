"""The proof that the suite can fail: every mutant dies by the property that its row names; an honest kernel does not.

A death is a FAIL. An ERROR or an UNSUPPORTED proves nothing: a mutant neither crashes nor lacks an option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.property import Property, no_edges
from properties.search import hunt, judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target, target_from
from targets.mutants.table import Mutant, mutants
from targets.probing.probes import probe

# A death is enough here: what the smallest failing input looks like is for others to say.
PROFILE = replace(PROFILES["quick"], shrink_seconds=0.0)
SEEDS = (0, 1, 2)
ROWS = [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row in mutants() for dtype in row.dtypes]
OPS = sorted({row.op for row in mutants()})


def rows_called(op: str, id: str) -> list[Property]:
    """All rows of the op's table with this id; a mutant may die by any of them."""
    return [row for row in properties_for(op) if row.id == id]


def subject_of(target: Target, dtype: str) -> Subject:
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def fails_on_edges(subject: Subject, id: str) -> bool:
    inputs = ((row, edge) for row in rows_called(subject.op, id) for edge in row.edges(subject))
    return any(judge(subject, row, edge).verdict is Verdict.FAIL for row, edge in inputs)


def fails_in_search(subject: Subject, id: str, seed: int) -> bool:
    searches = (hunt(subject, replace(row, edges=no_edges), seed=seed) for row in rows_called(subject.op, id))
    return any(record.verdict == Verdict.FAIL for records in searches for record in records)


def dies(target: Target, dtype: str, id: str) -> bool:
    """Whether the property kills: on one of its own inputs, which no run changes, or whatever the seed is."""
    subject = subject_of(target, dtype)
    return fails_on_edges(subject, id) or all(fails_in_search(subject, id, seed) for seed in SEEDS)


@pytest.mark.parametrize(("row", "dtype"), ROWS)
def test_dies_by_the_property_named(row: Mutant, dtype: str) -> None:
    assert dies(resolve(row.target, op=row.op), dtype, row.killed_by)


@pytest.mark.deep
@pytest.mark.parametrize(("row", "dtype"), ROWS)
def test_dies_in_a_hunt_with_every_seed(row: Mutant, dtype: str) -> None:
    """Edges and search as users run them; and no crash on the way."""
    subject = subject_of(resolve(row.target, op=row.op), dtype)
    for seed in SEEDS:
        found = [record for prop in rows_called(row.op, row.killed_by) for record in hunt(subject, prop, seed=seed)]
        verdicts = {record.verdict for record in found}
        assert Verdict.FAIL in verdicts
        assert Verdict.ERROR not in verdicts


def test_every_property_of_attention_kills_one() -> None:
    assert {row.id for row in properties_for("attention")} == {m.killed_by for m in mutants() if m.op == "attention"}


@pytest.mark.parametrize("op", OPS)
def test_every_killer_is_in_the_table_of_its_op(op: str) -> None:
    assert all(rows_called(op, row.killed_by) for row in mutants() if row.op == op)


# What follows shows that the tests above can fail.

HONEST = {
    "attention": "targets.honest.flash:attention",
    "attention_varlen": "targets.honest.layouts:attention_varlen",
    "attention_paged": "targets.honest.layouts:attention_paged",
    "mla": "targets.honest.mla:materialised",
    "rope": "targets.honest.rope:rope",
    "rope_backward": "targets.honest.rope:rope_backward",
    "softmax": "targets.honest.softmax:softmax",
}


@pytest.mark.parametrize(
    ("op", "id"),
    [
        ("attention", "P2"),
        ("attention", "P3"),
        ("attention", "P6"),
        ("attention", "P9"),
        ("attention", "P15"),
        ("attention", "P28"),
        ("mla", "P1"),
        ("rope", "P16"),
        ("rope", "P21"),
        ("rope_backward", "P14"),
        ("softmax", "P9"),
    ],
)
def test_an_honest_kernel_entered_as_a_mutant_is_noticed(op: str, id: str) -> None:
    entered = Mutant("honest", op, HONEST[op], id, ("bf16",), (), "none")
    with pytest.raises(AssertionError):
        test_dies_by_the_property_named(entered, "bf16")


def small(function: Callable[..., Any]) -> Target:
    return target_from(function, spec=function.__name__, op="attention")


def test_a_crash_is_no_death() -> None:
    def crashing(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> Any:
        raise RuntimeError("no memory")

    subject = subject_of(small(crashing), "fp32")
    records = [record for row in rows_called("attention", "P4") for record in hunt(subject, row)]
    assert {record.verdict for record in records} == {Verdict.ERROR}
    assert not dies(small(crashing), "fp32", "P4")


def test_a_missing_option_is_no_death() -> None:
    def plain(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.mT, -1) @ v

    assert not dies(small(plain), "fp32", "P4")
    assert dies(small(plain), "fp32", "P1")


def test_luck_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death that one seed finds and another does not is none."""
    target, found = resolve(HONEST["attention"]), {0: True, 1: False, 2: True}
    monkeypatch.setattr(f"{__name__}.fails_on_edges", lambda subject, id: False)
    monkeypatch.setattr(f"{__name__}.fails_in_search", lambda subject, id, seed: found[seed])
    assert not dies(target, "fp32", "P1")
    found[1] = True
    assert dies(target, "fp32", "P1")
