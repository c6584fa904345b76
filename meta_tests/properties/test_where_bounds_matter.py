"""Bounds are worked out only where two outputs differ: the judgement is the one that all bounds give."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from oracle.case import Case
from properties.checks import metamorphic
from properties.checks.metamorphic import agree, differing, full_bounds
from properties.judge.verdict import Verdict
from properties.subject import Subject, subject_for
from targets.calling.target import target_from


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


@pytest.fixture
def subject() -> Subject:
    return subject_for(target_from(kernel, spec="kernel.py:attention"), "fp32")


@pytest.fixture
def case() -> Case:
    rng = np.random.default_rng(0)
    return Case("attention", {n: rng.standard_normal((1, 3, 5, 4)).astype(np.float32) for n in ("q", "k", "v")})


def moved(out: np.ndarray[Any, Any], by: float) -> Mapping[str, np.ndarray[Any, Any]]:
    """Another value in one place of the second head."""
    changed = out.copy()
    changed[0, 1, 2, 3] += np.float32(by)
    return {"out": changed}


def test_only_blocks_with_a_difference_have_a_bound(subject: Subject, case: Case) -> None:
    first = subject.call(case).outputs
    whole = full_bounds(subject, case, first)
    some = full_bounds(subject, case, first, where=differing(first, moved(first["out"], 1.0)))
    for a, b in zip(whole, some, strict=True):
        assert np.array_equal(a["out"][:, 1], b["out"][:, 1])
        assert np.isinf(b["out"][:, [0, 2]]).all() and np.isfinite(a["out"]).all()


def test_equal_outputs_need_no_enclosure(subject: Subject, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    first = subject.call(case).outputs
    monkeypatch.setattr(metamorphic, "enclose", None)
    judged = agree(subject, case, first, case, dict(first), what="twice")
    assert judged.verdict is Verdict.PASS and judged.ratio == 0
    with pytest.raises(TypeError):
        agree(subject, case, first, case, moved(first["out"], 1e-7), what="twice")


@pytest.mark.parametrize(("by", "verdict"), [(0.0, Verdict.PASS), (2e-7, Verdict.PASS), (1.0, Verdict.FAIL)])
@pytest.mark.parametrize("value", [None, np.nan])
def test_the_judgement_is_that_of_all_bounds(
    subject: Subject,
    case: Case,
    by: float,
    verdict: Verdict,
    value: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = dict(subject.call(case).outputs)
    second = dict(moved(first["out"], by))
    if value is not None:
        second["out"][0, 2, 0, 0] = value
        verdict = Verdict.FAIL
    quick = agree(subject, case, first, case, second, what="moved")
    everywhere = {"out": np.ones(first["out"].shape, dtype=bool)}
    monkeypatch.setattr(metamorphic, "differing", lambda *given: everywhere)
    assert asdict(agree(subject, case, first, case, second, what="moved")) == asdict(quick)
    assert quick.verdict is verdict
