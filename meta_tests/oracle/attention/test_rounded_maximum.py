"""The rounded maximum of FlashAttention's exponent: within its bound wherever something is promised, and where not."""

from typing import Any

import numpy as np
import pytest

from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import preset_forms
from properties.judge.pipeline import certify
from properties.judge.verdict import Verdict
from properties.subject import subject_for
from targets.calling.registry import resolve

KERNEL = "targets.honest.flash_variants:rounded_maximum"
PRESETS = {"fp32": "fp32", "fp16": "flash", "bf16": "flash"}


def far_off(dtype: str, size: float, *, keys: int = 70, spread: float = 3.0, seed: int = 0) -> Case:
    """Scores near ``size``, a few nats apart, in several tiles, in one head of four rows."""
    rng, fmt = np.random.default_rng(seed), FORMATS[dtype]
    q, k = rng.standard_normal((1, 1, 4, 4)), rng.standard_normal((1, 1, keys, 4))
    root = np.sqrt(abs(size))
    q[..., 0], k[..., 0] = root, np.sign(size) * root * (1 + spread / max(abs(size), 1) * rng.random(keys))
    v = rng.standard_normal((1, 1, keys, 3))
    return Case("attention", {n: fmt.store(a) for n, a in {"q": q, "k": k, "v": v}.items()}, {"scale": 1.0})


def forms(dtype: str, *labels: str) -> tuple[Any, ...]:
    return tuple(f for f in preset_forms("attention", PRESETS[dtype]) if f.label in labels)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_kernel_stays_within_the_form_at_every_size(dtype: str, sign: float) -> None:
    subject = subject_for(resolve(KERNEL), dtype)
    only = forms(dtype, "rounded maximum")
    largest = 8 if dtype == "fp16" else 11
    promised = 0
    for seed, size in enumerate(np.logspace(0, largest, 45)):
        judged = certify(subject, far_off(dtype, sign * size, seed=seed), forms=only)
        assert judged.verdict in (Verdict.PASS, Verdict.EXEMPT, Verdict.VACUOUS), (size, judged.detail)
        promised += judged.verdict is Verdict.PASS
    assert promised > 10


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 3e9), ("bf16", 3e9)])
def test_beyond_the_range_only_this_form_promises_nothing(dtype: str, size: float) -> None:
    """u |m| log2 e is 258 there."""
    case = far_off(dtype, size)
    (block,) = enclose(case)
    plain, rounded = bounds_of("attention")(case, block, forms(dtype, "plain", "rounded maximum"), {})
    assert rounded["out"].may_overflow.all() and rounded["lse"].may_overflow.all()
    assert not plain["out"].may_overflow.any()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_near_zero_both_forms_are_the_same(dtype: str) -> None:
    case = far_off(dtype, 5.0)
    (block,) = enclose(case)
    plain, rounded = bounds_of("attention")(case, block, forms(dtype, "plain", "rounded maximum"), {})
    for name in ("out", "lse"):
        np.testing.assert_allclose(plain[name].bound, rounded[name].bound, rtol=1e-5)
        assert (rounded[name].bound >= plain[name].bound).all()


def test_next_to_zero_the_bound_grows_with_the_drift() -> None:
    """fp16, u |m| about 5: what its cast loses of small weights is e^5 times as much."""
    case = far_off("fp16", 6.0e4**2 / 43, keys=3)
    (block,) = enclose(case)
    plain, rounded = bounds_of("attention")(case, block, forms("fp16", "plain", "rounded maximum"), {})
    assert (rounded["out"].bound > plain["out"].bound).any()
    assert not rounded["out"].may_overflow.all()


def test_a_kernel_that_denies_the_form_is_held_to_an_exact_maximum() -> None:
    target = resolve("targets.mutants.attention.range:fused_exponent")
    case = far_off("fp32", 1e11, keys=3, spread=0.0)
    assert certify(subject_for(target, "fp32"), case).verdict is Verdict.FAIL
    assert certify(subject_for(resolve(KERNEL), "fp32"), case).verdict in (Verdict.EXEMPT, Verdict.VACUOUS)


def test_a_weight_factor_near_the_largest_number_exempts_nothing() -> None:
    """P in e4m3 times 256, whose largest number is 448: an ordinary row is promised its bound."""
    case = far_off("e4m3", 2.0, keys=5)
    (block,) = enclose(case)
    form = forms("bf16", "rounded maximum")[0].with_fields(weights="e4m3", weight_scale=256.0)
    (found,) = bounds_of("attention")(case, block, (form,), {"out": FORMATS["bf16"]})
    assert not found["out"].may_overflow.any() and np.isfinite(found["out"].bound).all()
