"""An option of attention needs a meaning, a check, inputs, words, a kernel and a mutant; what is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.attention.options import CHOICES, ROWS, TABLE, Sizes
from oracle.ops.table import op_named
from properties.ops.attention.options import MEANT, TRIED, Tried, of_row
from targets.calling.registry import resolve
from targets.honest.table import HONEST
from targets.mutants.table import mutants
from targets.probing.probes import probes_of
from targets.probing.tiny import tiny_case

# Inputs and words of these are those of the whole op: `properties.inputs.strategies`,
# `properties.ops.attention.diagnosis` and `diagnosis_masks`.
OF_THE_OP = ("scale", "is_causal", "attn_mask")
OPTIONS = tuple(row.name for row in TABLE if not row.meanings and row.name not in OF_THE_OP)
ATTENTION = op_named("attention")
JUNK = np.zeros(7)
AXES = {"B": 1, "Hq": 2, "Hkv": 2, "Sq": 3, "Sk": 3}

NEEDS: dict[str, Callable[[str], object]] = {
    "check of its values": lambda name: ROWS[name].check(JUNK, ROWS[name], Sizes(AXES, FORMATS["fp32"])),
    "row that says how it is tried": lambda name: tried(name),
    "words for a diagnosis": lambda name: tried(name).words,
    "edge input of P17": lambda name: tried(name).edges["matter"],
    "meaning": lambda name: any(_matters(name, value) for value in tried(name).drawn),
    "words for the meanings it depends on": lambda name: all(
        set(MEANT[choice]) == set(CHOICES[choice]) for choice in ROWS[name].depends if choice != "causal_alignment"
    ),
    "probe of the meanings it depends on": lambda name: set(ROWS[name].depends) <= set(probes_of(ATTENTION)),
    "honest variant": lambda name: [h for h in HONEST if h.op == "attention" and takes(h.target, name)],
    "mutant": lambda name: [m for m in mutants() if m.op == "attention" and takes(m.target, name)],
}


def tried(name: str) -> Tried:
    return next(row for row in TRIED.values() if name in of_row(row))


def takes(target: str, name: str) -> bool:
    return name in resolve(target).parameters


def _matters(name: str, value: Any) -> bool:
    """Whether the exact result is another one with the option."""
    options = {name: tried(name).value(name, value, FORMATS["fp32"], AXES)}
    case = tiny_case("attention", "fp32", queries=3, heads=2, kv_heads=2, **options)
    return any(not np.array_equal(_numbers(case, n), _numbers(case.without_options(name), n)) for n in ("out", "lse"))


def _numbers(case: Case, output: str) -> Any:
    return np.stack([block.part(output).hi for block in enclose(case)])


def missing(name: str) -> list[str]:
    found = []
    for what, ask in NEEDS.items():
        try:
            there = bool(ask(name))
        except (LookupError, ValueError, TypeError, StopIteration) as error:
            found.append(f"{what} ({type(error).__name__}: {error})")
        else:
            found += [] if there else [what]
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_everything(name: str) -> None:
    assert missing(name) == [], f"{name} has no {', no '.join(missing(name))}"


@pytest.mark.parametrize(
    ("what", "place", "instead"),
    [
        ("check of its values", "ROWS", {"softcap": TABLE[1]}),
        ("row that says how it is tried", "TRIED", {}),
        ("words for a diagnosis", "TRIED", {"softcap": Tried("softcap", "", (5.0,))}),
        ("edge input of P17", "TRIED", {"softcap": Tried("softcap", "the cap", (5.0,))}),
        ("meaning", "_matters", lambda name, value: False),
        ("words for the meanings it depends on", "MEANT", {}),
        ("probe of the meanings it depends on", "probes_of", lambda row: {}),
        ("honest variant", "HONEST", ()),
        ("mutant", "mutants", lambda: ()),
    ],
)
def test_what_is_missing_is_named(what: str, place: str, instead: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"meta_tests.test_option_coverage.{place}", instead)
    assert any(text.startswith(what) for text in missing("softcap"))


def test_options_of_one_table_are_those_of_the_other() -> None:
    assert {name for row in TRIED.values() for name in of_row(row)} == set(OPTIONS)
