"""What the checks of the rotary embedding say: angle errors by position, decoding, lengths, parameters of each rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from oracle.case import Case
from properties.judge.verdict import Verdict
from properties.ops.rope.relations import angle_error_of
from properties.ops.rope.scalings import decode_edges, scaling_edges
from properties.ops.rope.table import position_sweep
from properties.ops.table import properties_for
from properties.search import hunt, judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.mutants.table import mutant_named
from targets.probing.probes import probe

PROFILE = replace(PROFILES["quick"], examples=2, shrink_seconds=0.0)


def subject_of(name: str, dtype: str = "fp32") -> Subject:
    target = resolve(name)
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILE)


def titled(op: str, id: str, words: str) -> Any:
    return next(row for row in properties_for(op) if row.id == id and words in row.title)


def angle_errors(name: str) -> dict[int, float]:
    """Position -> largest angle error in radians, as the sweep records it."""
    subject = subject_of(name)
    row = titled(subject.op, "P1", "angles by position")
    found: dict[int, float] = {}
    for given in row.edges(subject):
        judged = judge(subject, row, given)
        assert judged.verdict in (Verdict.PASS, Verdict.VACUOUS), judged
        p = int(given.features["position"])
        found[p] = max(found.get(p, 0.0), judged.metrics["angle_error"])
    return found


def test_the_sweep_covers_2_10_to_2_24_and_131071() -> None:
    deep = replace(subject_of("seed_rope_torch"), profile=PROFILES["default"])
    places = {given.features["position"] for given in position_sweep(deep)}
    assert places >= {2**e for e in range(10, 25)} | {131071}


def test_float32_angles_of_a_kernel_are_off_by_4e_3_at_131071() -> None:
    """The common recipe: frequencies and angles in float32. With float64 angles only the output's rounding is left."""
    common, wide = angle_errors("seed_rope_torch"), angle_errors("seed_rope_numpy")
    assert 3e-3 < common[131071] < 5e-3
    assert wide[131071] < 2e-7
    # The error grows with the position, and is a radian's fraction at 2^24.
    places = sorted(p for p in common if p >= 2**10)
    steps = [(a, b) for a, b in pairwise(places) if b >= 4 * a]
    assert steps and all(common[b] > 1.5 * common[a] for a, b in steps)
    assert common[2**24] > 0.1
    assert max(wide.values()) < 2e-7


def test_float32_angles_are_off_by_4e_3_at_131071() -> None:
    """The largest pair of the common recipe in NumPy's float32: position times the rounded frequency, rounded."""
    d, position = 128, 131071
    exponent = np.arange(0, d, 2, dtype=np.float32) / np.float32(d)
    theta = np.float32(1) / np.float32(10000.0) ** exponent
    assert theta.dtype == np.float32
    angle = (np.float32(position) * theta).astype(np.float64)
    x = np.zeros((1, 1, 1, d))
    x[..., : d // 2] = 1.0
    case = Case("rope", {"x": x, "positions": np.array([position])})
    made = np.concatenate([np.cos(angle), np.sin(angle)])[None, None, None]
    assert 3e-3 < angle_error_of(case, made) < 5e-3


def test_records_of_the_sweep_hold_the_figure() -> None:
    subject = subject_of("seed_rope_torch", "bf16")
    row = titled("rope", "P1", "angles by position")
    records = hunt(subject, row)
    assert records and all(isinstance(r.metrics["angle_error"], float) for r in records)
    assert {r.features["sweep"] for r in records} == {"position"}


@pytest.mark.parametrize("name", ["seed_rope_torch", "seed_rope_numpy", "triton_rope", "seed_rope_torch_backward"])
def test_built_in_targets_keep_every_scaling(name: str) -> None:
    subject = subject_of(name)
    row = titled(subject.op, "P21", "as the parameters say")
    verdicts = [judge(subject, row, given).verdict for given in scaling_edges(subject)]
    unsupported = verdicts.count(Verdict.UNSUPPORTED)
    # One set of frequencies for each sequence, and for Triton the sections.
    if name == "seed_rope_numpy":
        assert not unsupported
    else:
        assert unsupported == 1 if name != "triton_rope" else unsupported < 12
    assert set(verdicts) <= {Verdict.PASS, Verdict.UNSUPPORTED}


def test_a_target_without_scaling_is_not_asked() -> None:
    def rope(x: Any, positions: Any) -> Any:
        raise AssertionError("called")

    from targets.calling.target import target_from

    subject = subject_for(target_from(rope, spec="rope"), "fp32", profile=PROFILE)
    for row in properties_for("rope"):
        if row.id == "P21":
            assert {r.verdict for r in hunt(subject, row)} == {Verdict.UNSUPPORTED}


def test_decoding_is_asked_one_by_one() -> None:
    """A target that restarts only for single tokens dies by P10 alone at those."""
    subject = subject_of(mutant_named("rope_single_token_one_behind").target)
    row = titled("rope", "P10", "any run")
    verdicts = [judge(subject, row, given).verdict for given in decode_edges(subject)]
    assert Verdict.FAIL in verdicts
    honest = subject_of("targets.honest.rope:rope")
    assert {judge(honest, row, given).verdict for given in decode_edges(honest)} == {Verdict.PASS}
