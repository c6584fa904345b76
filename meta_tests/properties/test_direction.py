"""The direction of errors: chance for honest rounding however its errors are shared, and far from it for a bias."""

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from oracle.formats import FORMATS, Float64Array
from properties.checks import direction, model_gate
from properties.judge.judgements import within_bound
from properties.judge.verdict import Verdict
from properties.ops.table import properties_for
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.mutants.table import mutant_named

FMT = FORMATS["bf16"]


def values(rng: Generator) -> Float64Array:
    """Rows that share a level, as those of one head do."""
    return np.asarray(rng.standard_normal((64, 32)) + rng.standard_normal((64, 1)) + rng.standard_normal((1, 32)))


def honest(rng: Generator, exact: Float64Array, shared: float) -> Float64Array:
    """Errors of rounding, and relative ones of ``shared`` roundings that whole rows and whole columns have."""
    u = FMT.unit_roundoff
    common = 1 + shared * u * (rng.uniform(-1, 1, (64, 1)) + rng.uniform(-1, 1, (1, 32)))
    return np.asarray(FMT.round(exact * common) - exact)


@pytest.mark.parametrize("shared", [0.05, 0.5, 2.0])
def test_honest_errors_are_chance(shared: float) -> None:
    rng = default_rng(5)
    signed = []
    for _ in range(400):
        exact = [values(rng) for _ in range(4)]
        ours, model = ([honest(rng, x, shared) for x in exact] for _ in range(2))
        total, modelled = direction.along(ours, exact)[0], direction.along(model, exact)[0]
        size = direction.apart(ours, model, exact)
        signed.append(size * np.sign(total - modelled))
    # Two kernels that round the same numbers are less apart than chance. Without what rows and columns share the
    # spread would be 3 to 6 with the largest share.
    assert (0.8 if shared > 0.1 else 0.3) < np.std(signed) < 1.25
    assert np.abs(signed).max() < direction.LIMIT


@pytest.mark.parametrize(("bias", "seen"), [(0.0, False), (0.5, True), (1 / 8, True)])
def test_a_bias_is_seen(bias: float, seen: bool) -> None:
    """In units of the last place: half of one is truncation."""
    rng = default_rng(6)
    exact = [values(rng) for _ in range(8)]
    model = [honest(rng, x, 0.2) for x in exact]
    ours = [honest(rng, x, 0.2) - bias * np.sign(x) * FMT.ulp(x) for x in exact]
    assert (direction.apart(ours, model, exact) > direction.LIMIT) is seen


def test_exact_and_lost_values_have_no_direction() -> None:
    exact, none = [np.ones((2, 2))], [np.zeros((2, 2))]
    assert direction.apart(none, none, exact) == 0.0
    assert direction.apart([np.full((2, 2), 1e-3)], none, exact) == np.inf
    assert direction.along([np.array([[np.nan, np.inf]])], [np.ones((1, 2))]) == (0.0, 0.0)


def gate(name: str, dtype: str) -> tuple[Subject, list[object]]:
    subject = subject_for(resolve(name), dtype, profile=PROFILES["quick"])
    prop = next(p for p in properties_for(subject.op) if p.id == "G3")
    assert prop.edges is not None
    return subject, list(prop.edges(subject))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["mla_output_truncated", "output_truncated"])
def test_a_truncated_output_is_seen_within_its_bound(name: str, dtype: str) -> None:
    subject, given = gate(mutant_named(name).target, dtype)
    judged = [model_gate.check(subject, x) for x in given]  # type: ignore[arg-type]
    worst = max(judged, key=lambda j: j.metrics["direction_out"])
    assert worst.verdict is Verdict.FAIL and worst.metrics["direction_out"] > 2 * direction.LIMIT
    assert "follow its sign" in worst.detail
    if name.startswith("mla"):
        assert within_bound(subject, given[0]).verdict is Verdict.PASS  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["flash:attention", "normalised:attention", "mla:materialised", "mla:absorbed"])
def test_an_honest_kernel_has_none(name: str, dtype: str) -> None:
    subject, given = gate(f"targets.honest.{name}", dtype)
    for x in given:
        assert model_gate.check(subject, x).metrics["direction_out"] < direction.LIMIT / 2  # type: ignore[arg-type]
