"""The proof that the suite does not fail what is right: every honest variant lives under every property of its op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.record import Record
from properties.search import hunt
from properties.subject import PROFILES, Profile, subject_for
from targets.calling.registry import resolve
from targets.honest.table import HONEST, Honest
from targets.mutants.table import mutant_named
from targets.probing.probes import probe

QUICK = PROFILES["quick"]
# Few drawn inputs, and contexts that are not the longest: the deep tests below have the rest.
FEW = replace(QUICK, examples=3, shrink_seconds=0.0, large=512)
LEGAL = {Verdict.PASS, Verdict.EXEMPT, Verdict.VACUOUS, Verdict.UNSUPPORTED}
# No row of the table asks softmax for a log-sum-exp, nor that for a gradient from stored weights.
NOT_ASKED = {("softmax", "P8"), ("log_softmax", "P8"), ("logsumexp", "P14")}
# What a kernel need not have: a causal rule, dropout.
OPTIONAL = {"P10", "P22"}
PAIRS = [(row, dtype) for row in HONEST for dtype in row.dtypes]


def one_dtype_each() -> list[tuple[Honest, str]]:
    """Each variant in one of its dtypes, by turns."""
    return [(row, row.dtypes[i % len(row.dtypes)]) for i, row in enumerate(HONEST)]


def named(pairs: list[tuple[Honest, str]]) -> list[object]:
    return [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row, dtype in pairs]


def records(row: Honest, dtype: str, profile: Profile, seed: int, *, contract: str | None = None) -> list[Record]:
    target = resolve(row.target, op=row.op)
    subject = subject_for(target, dtype, contract=contract, conventions=probe(target, dtype), profile=profile)
    return [record for prop in properties_for(row.op) for record in hunt(subject, prop, seed=seed)]


def assert_lives(found: list[Record], op: str) -> None:
    wrong = [f"{r.property} {r.verdict} on {r.description}: {r.detail}" for r in found if r.verdict not in LEGAL]
    assert not wrong, "\n".join(wrong[:3])
    passed = {r.property for r in found if r.verdict == Verdict.PASS}
    asked = {row.id for row in properties_for(op) if (op, row.id) not in NOT_ASKED}
    unsupported = {r.property for r in found if r.verdict == Verdict.UNSUPPORTED and not r.case}
    assert passed == asked - (unsupported & OPTIONAL)


@pytest.mark.parametrize(("row", "dtype"), named(one_dtype_each()))
def test_lives(row: Honest, dtype: str) -> None:
    assert_lives(records(row, dtype, FEW, seed=0), row.op)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("row", "dtype"), named(PAIRS))
def test_lives_in_every_dtype_with_every_seed(row: Honest, dtype: str, seed: int) -> None:
    assert_lives(records(row, dtype, QUICK, seed), row.op)


@pytest.mark.deep
@pytest.mark.parametrize(("row", "dtype"), named([(r, d) for r, d in PAIRS if r.op == "attention" and d != "fp64"]))
def test_lives_without_a_declared_contract(row: Honest, dtype: str) -> None:
    """What a kernel is held to if nothing is said: each form of the default preset covers the kernels of that form."""
    if row.name == "prescaled_query" and dtype != "fp32":
        pytest.skip("lives only with the contract that declares the rounding of q")
    assert_lives(records(row, dtype, QUICK, 4, contract="fp32" if dtype == "fp32" else "flash"), row.op)


def test_a_broken_kernel_among_them_is_noticed() -> None:
    name = "softmax_in_input_dtype"
    broken = Honest(name, "softmax", mutant_named(name).target, ("bf16",), "none")
    with pytest.raises(AssertionError, match="P1 FAIL on softmax"):
        test_lives(broken, "bf16")


def test_a_property_that_was_never_asked_is_noticed() -> None:
    row = next(row for row in HONEST if row.name == "softmax")
    found = records(row, "fp32", FEW, seed=0)
    assert_lives(found, row.op)
    with pytest.raises(AssertionError):
        assert_lives([r for r in found if r.property != "P28"], row.op)
