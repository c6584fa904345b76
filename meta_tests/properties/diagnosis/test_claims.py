"""What a diagnosis claims, and when it claims nothing.

Kernels that only add noise, that have two defects, or that are wrong at one input alone must get no "as if"; honest
kernels no diagnosis.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meta_tests.properties.diagnosis.cases import (
    PROFILE,
    attention_case,
    attention_with,
    broken,
    case_for,
    failures,
    subject_of,
)
from oracle.case import Case
from properties import search
from properties.diagnosis import engine
from properties.diagnosis.counterfactual import FailingCase, failing_case
from properties.diagnosis.engine import diagnose
from properties.judge.verdict import BAD, Verdict
from properties.message import failure_message
from properties.ops.table import properties_for
from properties.property import no_edges
from properties.search import hunt
from targets.honest import flash
from targets.honest import rope as honest_rope
from targets.honest import softmax as honest_softmax
from targets.honest.table import HONEST
from targets.mutants.table import mutant_named


@pytest.mark.parametrize("honest", HONEST, ids=lambda h: h.name)
def test_an_honest_kernel_has_no_diagnosis(honest: Any) -> None:
    subject = subject_of(honest.target, honest.dtypes[-1])
    assert diagnose(subject, case_for(subject)) == ""


@pytest.mark.parametrize("spec", ["targets.honest.flash:attention", "targets.honest.rope:rope"])
def test_a_passing_search_asks_for_no_diagnosis(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(spec, "bf16")
    row = next(p for p in properties_for(subject.op) if p.id == "P1")

    def refuse(*_: Any) -> str:
        raise AssertionError("diagnosed a case that does not fail")

    monkeypatch.setattr(search, "diagnose", refuse)
    records = hunt(subject, replace(row, edges=no_edges))
    assert [r.verdict for r in records] == [Verdict.PASS]


def noisy(values: Tensor, size: float) -> Tensor:
    """The same values always get the same noise."""
    generator = torch.Generator().manual_seed(zlib.crc32(values.double().numpy().tobytes()))
    return (values.double() + size * torch.randn(values.shape, generator=generator).double()).to(values.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [0.003, 0.1, 1.0])
@pytest.mark.parametrize("op", ["attention", "rope", "softmax"])
def test_noise_is_placed_and_not_explained(op: str, size: float, dtype: str) -> None:
    def rope(x: Tensor, positions: Tensor, *, base: float = 10000.0, layout: str = "half") -> Tensor:
        return noisy(honest_rope.rope(x, positions, base=base, layout=layout), size)

    def softmax(x: Tensor) -> Tensor:
        return noisy(honest_softmax.softmax(x), size)

    attention = attention_with(lambda out, lse, q: (noisy(out, size), noisy(lse, size)))
    subject = broken({"attention": attention, "rope": rope, "softmax": softmax}[op], op, dtype)
    case = case_for(subject)
    failing = failing_case(subject, case, subject.call(case).outputs)
    found = diagnose(subject, case)
    assert "as if" not in found
    assert ("wrong" in found) or not failing.broken()
    assert failing.broken() or size == 0.003


def test_two_defects_are_not_taken_for_one() -> None:
    steps = flash.Steps(scale_of=lambda given, dim: 1.0, kv_head=lambda heads, shared: torch.arange(heads) % shared)
    subject = broken(flash.kernel(steps, conventions={"causal_alignment": "bottom_right"}), "attention", "fp32")
    rng = np.random.default_rng(2)
    shapes = {"q": (1, 4, 3, 16), "k": (1, 2, 9, 16), "v": (1, 2, 9, 16)}
    case = Case("attention", {n: subject.fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, {})
    assert diagnose(subject, case).startswith("wrong ")


def test_a_fault_at_one_input_alone_is_not_explained_by_what_fresh_numbers_contradict() -> None:
    seen: list[Tensor] = []

    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        seen[:] = seen or [q.clone()]
        return (out * 0, lse) if q.shape == seen[0].shape and torch.equal(q, seen[0]) else (out, lse)

    subject = broken(attention_with(change), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "wrong only in the output, not the LSE"


def test_zeros_everywhere_are_explained_by_zeros() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "as if the output were zeros"


def test_an_output_that_is_another_in_each_call_has_no_explanation() -> None:
    calls: list[int] = []

    def change(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return out * (len(calls) + 1), lse

    subject = broken(attention_with(change), "attention", "fp32")
    assert diagnose(subject, attention_case(subject)) == "another result in a second call"


def test_a_case_that_is_too_large_is_placed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    monkeypatch.setattr(engine, "LARGEST_CASE", 100)
    assert diagnose(subject, attention_case(subject)) == "wrong only in the output, not the LSE"


def test_without_time_nothing_is_claimed() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    assert diagnose(subject, attention_case(subject), seconds=0.0) == "wrong only in the output, not the LSE"


def test_a_known_defect_is_asked_about_first_and_claimed_only_if_it_fits() -> None:
    subject = broken(attention_with(lambda out, lse, q: (out * 0, lse)), "attention", "fp32")
    case = attention_case(subject)
    # Without time for the table, what is known is all that is asked.
    assert diagnose(subject, case, seconds=0.0, known=("as if the output were zeros",)) == "as if the output were zeros"
    assert diagnose(subject, case, seconds=0.0, known=("as if the output were negated",)).startswith("wrong ")
    assert diagnose(subject, case, known=("as if the output were negated",)) == "as if the output were zeros"


def test_a_list_of_failures_is_asked_once_about_all_counterfactuals(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(PROFILE, shrink_seconds=60.0)
    subject = replace(subject_of(mutant_named("gqa_tiled").target, "bf16"), profile=profile)
    row = next(p for p in properties_for("attention") if p.id == "P13")
    asked: list[str] = []
    whole = engine._claim

    def counted(failing: FailingCase, deadline: float) -> str:
        asked.append(whole(failing, deadline))
        return asked[-1]

    monkeypatch.setattr(engine, "_claim", counted)
    bad = [r for r in hunt(subject, replace(row, search=None)) if r.verdict in BAD and r.diagnosis]
    assert len(bad) > 2
    assert {r.diagnosis for r in bad} == {"as if KV heads were tiled (h mod Hkv) instead of repeated"}
    assert len(asked) == 1


def test_the_message_of_a_failure_shows_how_it_looks() -> None:
    subject = subject_of(mutant_named("gqa_tiled").target, "bf16")
    row = next(p for p in properties_for("attention") if p.id == "P13")
    record = next(failures(subject, (row,)))
    lines = failure_message(record).splitlines()
    assert "  looks    as if KV heads were tiled (h mod Hkv) instead of repeated" in lines
    assert not any(line.startswith("  looks") for line in failure_message(replace(record, diagnosis="")).splitlines())


def test_edges_beyond_the_budget_are_not_diagnosed() -> None:
    subject = replace(
        subject_of(mutant_named("scale_one_by_default").target, "bf16"),
        profile=replace(PROFILE, shrink_seconds=0.05),
    )
    row = next(p for p in properties_for("attention") if p.id == "P17")
    bad = [r for r in hunt(subject, replace(row, search=None)) if r.verdict in BAD]
    explained = [bool(r.diagnosis) for r in bad]
    assert explained[0]
    assert not explained[-1]
    assert all(a or not b for a, b in pairwise(explained))
