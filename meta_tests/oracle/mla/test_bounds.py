"""Bounds of mla: no honest kernel exceeds them, defects and false contracts do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.kernels import honest_attention
from meta_tests.kernels.mla_inputs import FAMILIES, draw, enclosed
from meta_tests.kernels.mla_kernels import ORDERS, Kernel, run
from oracle.arithmetic.arb import arb_arithmetic
from oracle.block import Block
from oracle.bounds.mla import output as bounds_mla
from oracle.case import Case
from oracle.contract.contract import Contract, contract_of
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms, preset_forms
from oracle.ops.mla import case as mla_case
from oracle.ops.mla import formula as mla


def legal(fmt: str, rng: np.random.Generator) -> Iterator[tuple[str, Kernel, Contract]]:
    """Honest kernels with the contract form that each keeps."""
    low = None if fmt in ("fp32", "fp64") else fmt
    for form in mla.FORMS:
        for stored in (False, True) if low else (False,):
            declared = "input" if stored else None
            contract = contract_of("x", form=form, up=declared, latent=declared)
            kept = fmt if stored else None
            kernel = Kernel(form, up=kept, latent=kept, weights=low, order=str(rng.choice(ORDERS)))
            base_two, splits = bool(rng.integers(2)), int(rng.choice([2, 4, 8]))
            if fmt == "fp64":
                double, wide = (
                    contract.with_fields(compute="fp64", weights="fp64"),
                    replace(kernel, wide=np.float64),
                )
                yield "fp64", replace(wide, base_two=base_two), double
                yield "fp64 normalised", replace(wide, normalised=True), double.with_fields(normalised_p=True)
                continue
            yield "flash", replace(kernel, base_two=base_two, tile=int(rng.choice([16, 32]))), contract
            yield "fp32", replace(kernel, weights=None), contract.with_fields(weights="fp32")
            yield "normalised", replace(kernel, normalised=True), contract.with_fields(normalised_p=True)
            yield "rounded sum", replace(kernel, rounded_sum=True), contract.with_fields(row_sum="rounded")
            yield "split", replace(kernel, splits=splits, base_two=base_two), contract.with_fields(splits=8)
            yield "lazy", replace(kernel, lag=5.5, base_two=base_two), contract.with_fields(lag=8 * np.log(2))
            math = contract.with_fields(weights="fp32", qk_prescale="compute", normalised_p=True)
            yield "sdpa_math", replace(kernel, weights=None, prescaled=True, normalised=True), math
            eager = contract.with_fields(scores="input", score_stores=2, normalised_p=True)
            yield "eager", replace(kernel, stores=fmt, normalised=True), eager
            if fmt == "fp32":
                yield (
                    "tf32",
                    replace(kernel, operands="tf32", weights="tf32"),
                    contract.with_fields(weights="fp32", operands="tf32"),
                )


def ratios(
    case: Case, block: Block, kernels: list[tuple[str, Kernel, Contract]], fmt: str
) -> Iterator[tuple[str, float, float, Any]]:
    """(name, worst error/bound of out, of lse, out) per kernel, empty and exempt elements left out."""
    inputs = mla_case.head(case, (0, 0), block.rows)
    formats = {"out": FORMATS[fmt], "lse": FORMATS["fp64" if fmt == "fp64" else "fp32"]}
    found = bounds_mla.bounds(case, block, [contract for *_, contract in kernels], formats)
    for (name, kernel, _), bounded in zip(kernels, found, strict=True):
        out, lse = run(kernel, inputs.arrays(), inputs.visible, case.options.get("scale"), fmt)
        worst = []
        for which, y in (("out", out), ("lse", lse)):
            exact, limit = block.part(which), bounded[which]
            counted = ~block.empty[:, None] & ~limit.may_overflow
            excess = exact.distance(y) - exact.rad
            with np.errstate(all="ignore"):
                ratio = np.where(counted & ~(excess <= 0), excess / limit.bound, 0.0)
            worst.append(float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0)))
        yield f"{name}, {kernel.form}", worst[0], worst[1], out


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_no_honest_kernel_exceeds_its_bound(fmt: str) -> None:
    rng, highest, seen = np.random.default_rng(8), {"out": 0.0, "lse": 0.0}, set()
    drawn = [(family, draw(rng, fmt, family)) for _ in range(12) for family in FAMILIES]
    # Long enough for the sum over keys to outweigh every other error.
    drawn += [
        (family, draw(rng, fmt, family, (1, 300, 1, 1, 2, 2))) for family in ("swamped latents", "one sign", "ties")
    ]
    for family, case in drawn:
        for name, out, lse, _ in ratios(case, enclosed(case), list(legal(fmt, rng)), fmt):
            assert out <= 1, (name, family, case.describe())
            assert lse <= 1, (name, family, case.describe())
            highest = {"out": max(highest["out"], out), "lse": max(highest["lse"], lse)}
            seen.add(name)
    assert len(seen) == (18 if fmt == "fp32" else 16)
    # Honest kernels come near: the bounds are not merely large.
    assert highest["out"] > (0.2 if fmt == "fp32" else 0.8)
    assert highest["lse"] > (0.4 if fmt == "fp32" else 0.6)


def test_float64_kernels_keep_the_float64_contract() -> None:
    rng, highest = np.random.default_rng(9), 0.0
    for family in FAMILIES:
        case = draw(rng, "fp64", family)
        for name, out, lse, _ in ratios(case, enclosed(case, arb_arithmetic(128)), list(legal("fp64", rng)), "fp64"):
            assert max(out, lse) <= 1, (name, family, case.describe())
            highest = max(highest, out, lse)
    assert highest > 0.05


@pytest.mark.parametrize("form", mla.FORMS)
@pytest.mark.parametrize("broken", ["scale from d_h", "rope part omitted", "w_uv transposed"])
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_broken_kernels_exceed_the_bound(form: str, broken: str, fmt: str) -> None:
    """Under the loosest contract of the format, on plain normal inputs."""
    rng, preset = np.random.default_rng(10), "tf32" if fmt == "fp32" else "eager"
    contract = next(f for f in preset_forms("mla", preset) if f.latent.form == form)
    low = None if fmt == "fp32" else fmt
    honest = Kernel(form, up=low, latent=low, weights=low, stores=low, normalised=True)
    case = draw(rng, fmt, "normal", (4, 33, 16, 8, 32, 8)).without_options("is_causal", "causal_alignment")
    pair = [("honest", honest, contract), ("broken", replace(honest, broken=broken), contract)]
    (_, good, good_lse, _), (_, bad, bad_lse, _) = ratios(case, enclosed(case), pair, fmt)
    assert max(good, good_lse) <= 1
    assert bad > 1
    assert broken == "w_uv transposed" or bad_lse > 1


@pytest.mark.parametrize("form", mla.FORMS)
@pytest.mark.parametrize("field", ["up", "latent"])
def test_a_stage_stored_lower_than_declared_exceeds_the_bound(form: str, field: str) -> None:
    if form == "materialised" and field == "latent":
        # A materialised kernel has no latent sum: the field changes nothing.
        case = draw(np.random.default_rng(12), "fp16", "normal")
        forms = [contract_of("x", latent=value) for value in (None, "input")]
        first, second = bounds_mla.bounds(case, enclosed(case), forms, {})
        assert np.array_equal(first["out"].bound, second["out"].bound, equal_nan=True)
        return
    rng, worst, kept = np.random.default_rng(12), 0.0, 0.0
    kernel = replace(Kernel(form), **{field: "bf16"})
    for family in ("normal", "one sign", "peaked", "massive"):
        case = draw(rng, "fp32", family, (4, 17, 16, 8, 32, 8)).without_options("is_causal", "causal_alignment")
        plain = contract_of("x", weights="fp32", form=form)
        pair = [("false", kernel, plain), ("true", kernel, plain.with_fields(**{field: "bf16"}))]
        (_, out, lse, _), (_, out_kept, lse_kept, _) = ratios(case, enclosed(case), pair, "fp32")
        worst, kept = max(worst, out, lse), max(kept, out_kept, lse_kept)
    assert worst > 1 >= kept


def test_the_two_forms_agree_within_the_sum_of_their_bounds() -> None:
    rng, highest = np.random.default_rng(13), 0.0
    for family in FAMILIES:
        case = draw(rng, "bf16", family, (3, 17, 8, 4, 16, 6))
        block, inputs = enclosed(case), mla_case.head(case, (0, 0), np.arange(3))
        forms = {f.latent.form: f for f in preset_forms("mla", "eager")}
        allowed = bounds_mla.agreement(case, block, forms["materialised"], forms["absorbed"], {"out": FORMATS["bf16"]})[
            "out"
        ]
        outs = {}
        for name, broken in (("materialised", ""), ("absorbed", ""), ("absorbed", "w_uv transposed")):
            kernel = Kernel(
                name, up="bf16", latent="bf16", weights="bf16", stores="bf16", normalised=True, broken=broken
            )
            outs[name + broken] = run(kernel, inputs.arrays(), inputs.visible, case.options.get("scale"), "bf16")[0]
        counted = ~allowed.may_overflow & ~block.empty[:, None]
        gap = np.abs(outs["materialised"] - outs["absorbed"])
        assert (gap <= allowed.bound)[counted].all(), family
        highest = max(highest, float((gap / allowed.bound)[counted].max(initial=0.0)))
        if family == "normal":
            wrong = np.abs(outs["materialised"] - outs["absorbedw_uv transposed"])
            assert (wrong > allowed.bound).any()
    assert highest > 0.05


def test_overflow_of_a_stored_stage_is_exempt_only_where_the_contract_stores_it() -> None:
    case = draw(np.random.default_rng(14), "fp16", "normal", (2, 5, 4, 2, 8, 3)).without_options(
        "is_causal", "causal_alignment"
    )
    latents = np.abs(case.arrays["c_kv"]) + np.float16(1)
    up = np.abs(case.arrays["w_uk"]) + np.float16(0.5)
    # k^C reaches 1e5 with q small, so that scores and outputs stay far from overflow.
    case = case.with_arrays(
        c_kv=latents * np.float16(200), w_uk=up * np.float16(200), w_uv=case.arrays["w_uv"] / np.float16(200)
    )
    case = case.with_arrays(q_nope=case.arrays["q_nope"] * np.float16(1e-4))
    block = enclosed(case)
    stored, kept, absorbed = bounds_mla.bounds(
        case,
        block,
        [contract_of("x", up="input"), Contract("x"), contract_of("x", form="absorbed", up="input")],
        {},
    )
    assert stored["out"].may_overflow.all()
    assert stored["lse"].may_overflow.all()
    assert not kept["out"].may_overflow.any()
    assert not absorbed["out"].may_overflow.any()
    inputs = mla_case.head(case, (0, 0), block.rows)
    out, _ = run(Kernel("materialised", up="fp16", weights="fp16"), inputs.arrays(), inputs.visible, None, "fp16")
    assert not np.isfinite(out).all(), "the exemption is for something that happens"


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_the_model_kernel_keeps_every_contract_and_rounds_what_it_declares(fmt: str) -> None:
    rng = np.random.default_rng(15)
    case = draw(rng, fmt, "normal", (4, 40, 8, 4, 16, 6)).without_options("is_causal", "causal_alignment")
    block, rows = enclosed(case), np.arange(4)
    presets = ("fp32", "sdpa_math", "tf32") if fmt == "fp32" else ("fp32", "flash", "sdpa_math", "eager")
    for preset in presets:
        forms = preset_forms("mla", preset)
        for form, bounded in zip(forms, bounds_mla.bounds(case, block, forms, {}), strict=True):
            modelled = mla_case.model(case, (0, 0), rows, form)
            assert modelled["out"].shape == (4, 6)
            assert modelled["lse"].shape == (4, 1)
            for name, y in modelled.items():
                assert (block.part(name).distance(y) <= bounded[name].bound).all(), (form.label, name)
    wide = contract_of("x", weights="fp32", output="fp32")
    for form, name in (("materialised", "up"), ("absorbed", "up"), ("absorbed", "latent")):
        low = wide.with_fields(form=form, **{name: "bf16"})
        error = [
            block.part("out").distance(mla_case.model(case, (0, 0), rows, c)["out"]).max()
            for c in (wide.with_fields(form=form), low)
        ]
        assert error[0] < 1e-5 < 3e-4 < error[1], (form, name)


def test_presets_of_mla_name_both_forms_and_eager_stores_every_stage() -> None:
    for preset in ("fp64", "fp32", "flash", "tf32", "sdpa_math", "eager"):
        forms = preset_forms("mla", preset)
        assert {f.latent.form for f in forms} == set(mla.FORMS)
        kept, stored = (None, None), ("input", "input")
        # A fused kernel may follow calls that store what they project.
        known = {"eager": {stored}, "flash": {kept, stored}}.get(preset, {kept})
        assert {(f.latent.up, f.latent.summed) for f in forms} == known
    declared = declared_forms("mla", {"preset": "flash", "form": "absorbed"}, "bf16")
    assert {f.latent.form for f in declared} == {"absorbed"}
    assert len(declared) == len(preset_forms("mla", "flash")) // 2
    with pytest.raises(ValueError, match="form is 'folded'; valid: materialised, absorbed"):
        declared_forms("mla", {"form": "folded"}, "bf16")


def test_a_sum_from_an_earlier_sweep_does_not_cancel_for_a_constant_v() -> None:
    """A normalised P in two sweeps: l is summed about running maxima, the weights are not; with one v it shows."""
    rng = np.random.default_rng(0)
    n, d_h, d_r, d_c, d_v, sq = 300, 4, 2, 3, 2, 2
    arrays = {
        "q_nope": rng.standard_normal((1, 1, sq, d_h)),
        "q_pe": np.abs(rng.standard_normal((1, 1, sq, d_r))),
        "c_kv": np.repeat(rng.standard_normal((1, 1, d_c)), n, axis=1),
        "k_pe": np.sort(np.abs(rng.standard_normal((1, n, d_r))), axis=1),
        "w_uk": rng.standard_normal((1, d_h, d_c)),
        "w_uv": rng.standard_normal((1, d_v, d_c)),
    }
    case = Case("mla", {name: value.astype(np.float32) for name, value in arrays.items()})
    held = case.arrays
    declared = {"preset": "flash", "normalised_p": True, "exp": 2.0**-10, "form": "materialised"}
    block = enclose(case)[0]
    fp32 = FORMATS["fp32"]
    forms = declared_forms("mla", declared, "fp32")[:1]
    bounded = bounds_mla.bounds(case, block, forms, {"out": fp32, "lse": fp32})[0]
    keys = np.concatenate([(held["c_kv"][0] @ held["w_uk"][0].T).astype(np.float32), held["k_pe"][0]], axis=1)
    values = (held["c_kv"][0] @ held["w_uv"][0].T).astype(np.float32)
    queries = np.concatenate([held["q_nope"][0, 0], held["q_pe"][0, 0]], axis=1)
    wide = [a.astype(np.float64) for a in (queries, keys, values)]
    done = honest_attention.run(
        honest_attention.KERNELS["coarse exp, normalised"],
        fp32,
        *wide,
        alpha=1 / np.sqrt(d_h + d_r),
        visible=np.ones((sq, n), dtype=bool),
    )
    assert (block.part("out").distance(done.out) <= bounded["out"].bound).all()
    assert (block.part("out").distance(done.out) > bounded["out"].bound / 300).any(), "the kernel no longer shows it"
