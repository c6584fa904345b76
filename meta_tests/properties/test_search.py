"""How much is tried of an interpreted target: all of it when it is asked for, a share in the job of all targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from properties import search
from properties.ops.table import properties_for
from properties.subject import PROFILES, Profile, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target

DTYPES = ("fp32", "fp16", "bf16")


@pytest.fixture
def interpreted() -> Target:
    return replace(resolve("targets.honest.flash:attention"), interpreted=True)


def subject(target: Target, dtype: str, profile: Profile) -> Subject:
    return subject_for(target, dtype, profile=profile)


def test_a_target_that_is_asked_for_meets_every_input(interpreted: Target) -> None:
    for prop in properties_for("attention"):
        asked = subject(interpreted, "fp16", PROFILES["quick"])
        assert len(list(search._edges(asked, prop))) == len(list(prop.edges(asked))), prop.id


def test_in_the_job_of_all_the_dtypes_together_meet_every_input(interpreted: Target) -> None:
    shared = replace(PROFILES["quick"], shared=True)
    thinned = 0
    for prop in properties_for("attention"):
        whole = {d: list(prop.edges(subject(interpreted, d, shared))) for d in DTYPES}
        seen = {d: list(search._edges(subject(interpreted, d, shared), prop)) for d in DTYPES}
        if len(whole["fp32"]) > search.FEW:
            thinned += 1
            assert len(seen["fp32"]) + len(seen["fp16"]) == len(whole["fp32"]), prop.id
            assert len(seen["bf16"]) < len(whole["bf16"])
        else:
            assert [len(seen[d]) for d in DTYPES] == [len(whole[d]) for d in DTYPES], prop.id
    assert thinned > 5


@pytest.mark.parametrize("shared", [False, True])
def test_only_interpreted_targets_draw_fewer_cases(interpreted: Target, shared: bool) -> None:
    profile = replace(PROFILES["default"], shared=shared)
    compiled = replace(interpreted, interpreted=False)
    assert search._examples(subject(compiled, "fp32", profile)) == profile.examples
    assert search._examples(subject(interpreted, "fp32", profile)) == profile.examples // (16 if shared else 4)
