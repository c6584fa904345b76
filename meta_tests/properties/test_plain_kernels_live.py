"""Attention as users write it first, and its gradients by autograd: no property fails one, and limits are told."""

from dataclasses import replace

import pytest

from properties.fit import fit
from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.record import Record
from properties.search import hunt
from properties.subject import PROFILES, subject_for
from targets.calling.gradient import gradient_of
from targets.calling.registry import resolve
from targets.calling.target import Target
from targets.honest.table import PLAIN

FEW = replace(PROFILES["quick"], examples=2, shrink_seconds=0.0, large=128)
LEGAL = {Verdict.PASS, Verdict.EXEMPT, Verdict.VACUOUS, Verdict.UNSUPPORTED}
DTYPES = ("fp32", "fp16", "bf16")
# Accuracy, exclusion, extreme logits and scales: where conventions of rows without a key show.
ASKED = {"P1", "P2", "P3", "P6", "P9", "P11", "P13", "P14", "P18", "P23"}


def examined(target: Target, dtype: str) -> list[Record]:
    found = fit(subject_for(target, dtype))
    assert not found.misfit and not found.wrong, found
    subject = subject_for(found.taken_by(target), dtype, conventions=found.conventions, profile=FEW)
    return [record for prop in properties_for(target.op) if prop.id in ASKED for record in hunt(subject, prop)]


def assert_right(found: list[Record]) -> None:
    wrong = [f"{r.property} {r.verdict} on {r.description}: {r.detail}" for r in found if r.verdict not in LEGAL]
    assert not wrong, "\n".join(wrong[:3])
    assert sum(r.verdict == Verdict.PASS for r in found) > 20


@pytest.mark.parametrize(("spec", "dtype"), [(s, DTYPES[i % 3]) for i, s in enumerate(PLAIN)])
def test_lives(spec: str, dtype: str) -> None:
    assert_right(examined(resolve(spec), dtype))


@pytest.mark.parametrize(("spec", "dtype"), [(s, DTYPES[(i + 1) % 3]) for i, s in enumerate(PLAIN)])
def test_its_gradients_live(spec: str, dtype: str) -> None:
    gradient = gradient_of(resolve(spec))
    assert gradient is not None
    assert_right(examined(gradient, dtype))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", PLAIN)
def test_lives_in_every_dtype(spec: str, dtype: str) -> None:
    gradient = gradient_of(resolve(spec))
    assert gradient is not None
    assert_right(examined(resolve(spec), dtype))
    assert_right(examined(gradient, dtype))


def test_a_gradient_that_loses_more_than_its_empty_rows_is_noticed() -> None:
    def attention(q, k, v, is_causal=False):  # type: ignore[no-untyped-def]
        out = resolve(PLAIN[0]).function(q, k, v, is_causal=is_causal)
        return out + 0 * (v.sum() * 1e30 * 1e30)

    gradient = gradient_of(replace(resolve(PLAIN[0]), function=attention))
    assert gradient is not None
    with pytest.raises(AssertionError, match="FAIL"):
        assert_right(examined(gradient, "fp32"))
