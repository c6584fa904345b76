"""Attention bounds against honest kernels, against defects, and against a second evaluation of the same formula.

A short run of the attack: each honest kernel of `honest_attention` meets every family of inputs, and none may exceed
the bound of its own contract. ``-m deep`` runs more seeds. What is tried, what was found and the worst ratios:
docs/bounds.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.attention_attack import FAMILIES, attack, enclosed, family, outputs, ratios, stored
from meta_tests.kernels.honest_attention import KERNELS, Kernel
from meta_tests.witnesses.plain_bound import plain_bound
from oracle.arithmetic.arb import arb_arithmetic
from oracle.block import Block
from oracle.bounds.attention import output as attention_bounds
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract import constants as contracts
from oracle.contract.constants import Constants, constants
from oracle.contract.contract import Contract
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.contracts import declared_forms, preset_forms

SHAPES = ((2, 1, 1, 2), (2, 2, 3, 1), (3, 7, 8, 2), (2, 33, 2, 3), (2, 64, 16, 2))


def worst_of(kernel: Kernel, seeds: range) -> dict[tuple[str, str, str], float]:
    worst = {}
    for seed in seeds:
        for index, name in enumerate(FAMILIES):
            fmt = FORMATS[kernel.formats[(seed + index) % len(kernel.formats)]]
            shape = SHAPES[(seed * 3 + index) % len(SHAPES)]
            for output, ratio in attack(kernel, fmt, name, shape, seed).items():
                worst[name, fmt.name, output] = max(ratio, worst.get((name, fmt.name, output), 0.0))
    return worst


@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound(name: str) -> None:
    worst = worst_of(KERNELS[name], range(3))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}
    # An attack that comes nowhere near would prove little.
    assert max(worst.values()) > 0.05


@pytest.mark.deep
@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound_in_a_long_run(name: str) -> None:
    worst = worst_of(KERNELS[name], range(3, 60))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}


@pytest.mark.parametrize("name", ["blas", "fma", "split 8", "normalised", "rounded sum", "lazy", "eager", "tf32"])
@pytest.mark.parametrize("inputs", ["normal", "ties", "sink and needle", "growing"])
def test_long_rows_keep_their_bounds(name: str, inputs: str) -> None:
    kernel = replace(KERNELS[name], order="blas", tile=max(KERNELS[name].tile, 64))
    fmt = FORMATS[kernel.formats[-1]]
    found = attack(kernel, fmt, inputs, (4, 2048, 64, 4), 0)
    assert max(found.values()) <= 1


def test_the_attack_comes_close() -> None:
    # Half a unit of the output is the whole bound in rows like these, so an honest kernel reaches nearly all of it.
    close = max(
        max(attack(KERNELS["in place"], FORMATS["fp16"], "subnormal v", SHAPES[2], s).values()) for s in range(20)
    )
    assert 0.8 < close <= 1


# ---- what must exceed: a check that cannot fail proves nothing


DEFECTS: dict[str, tuple[Kernel, str, str, str]] = {
    # A kernel, the family and format in which it is caught, and the output that shows it.
    "scores in bf16": (Kernel({"preset": "flash"}, stores=1), "wide logits", "bf16", "lse"),
    "scores in fp16": (Kernel({"preset": "flash"}, stores=1), "wide logits", "fp16", "lse"),
    "row sum in bf16": (Kernel({"preset": "flash"}, row_sum="bf16"), "ties", "bf16", "lse"),
    "rounded row sum undeclared": (Kernel({"preset": "flash"}, rounded_sum=True), "small weights", "bf16", "lse"),
    "scaled q stored undeclared": (Kernel({"preset": "flash"}, scale_on="q_stored"), "cancelling", "bf16", "lse"),
    "P cast under fp32": (Kernel({"preset": "fp32"}), "sink and needle", "bf16", "out"),
    "tf32 under sdpa_math": (
        Kernel({"preset": "sdpa_math"}, ("fp32",), tf32=True, normalised=True, tile=4096),
        "wide logits",
        "fp32",
        "lse",
    ),
    "coarse exp undeclared": (Kernel({"preset": "flash"}, spite="rescale", exp_error=2.0**-8), "growing", "fp32", "lse"),  # noqa: E501
    "accumulator in fp16 undeclared": (Kernel({"preset": "flash"}, accumulator="fp16", in_place=True), "ties", "fp16", "out"),  # noqa: E501
    "eager in one store of three": (Kernel({"preset": "sdpa_math"}, stores=2, normalised=True, tile=4096), "wide logits", "bf16", "lse"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_promise_exceeds_the_bound(name: str) -> None:
    kernel, inputs, fmt, output = DEFECTS[name]
    kernel = replace(kernel, cast=kernel.contract["preset"] != "sdpa_math")
    form = preset_forms("attention", str(kernel.contract["preset"]))[0]
    worst = 0.0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        case = stored(family(inputs, FORMATS[fmt], rng, (4, 300, 18, 4)), FORMATS[fmt])
        block, bounded = enclosed(case, form, {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})
        worst = max(worst, ratios(outputs(kernel, FORMATS[fmt], case, block), block, bounded)[output])
    assert worst > 1


MISSING: dict[str, tuple[str, str, str, dict[str, float]]] = {
    # A term that a first version of these bounds left out, and the honest kernel that exceeds the bound without it.
    "flushed inputs": ("flush", "subnormal q", "fp16", {"omega_in": 0.0, "omega_v": 0.0}),
    "tf32 next to zero": ("tf32 normalised", "subnormal q", "fp32", {"omega_in": 0.0, "omega_v": 0.0}),
    "fp16 accumulator next to zero": ("fp16 accumulator", "subnormal v", "fp16", {"w_acc": 2.0**-126}),
    "underflow of the cast": ("in place", "weights that underflow", "fp16", {"omega_P": 0.0}),
    "rounding of a subnormal output": ("blas", "subnormal v", "fp16", {"omega_o": 0.0}),
    "underflow of exp": ("flush", "weights that underflow", "bf16", {"w": 0.0, "w_acc": 0.0, "omega_P": 0.0}),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_bound_without_one_term_is_exceeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_name, inputs, fmt_name, without = MISSING[name]
    kernel, fmt = KERNELS[kernel_name], FORMATS[fmt_name]

    def crippled(form: Contract, input_format: Format) -> Constants:
        return replace(constants(form, input_format), **without)

    def worst() -> float:
        return max(max(attack(kernel, fmt, inputs, shape, s).values()) for shape in SHAPES for s in range(6))

    assert worst() <= 1
    monkeypatch.setattr(attention_bounds, "constants", crippled)
    assert worst() > 1


def test_rescales_of_a_normalised_p_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, shape = KERNELS["coarse exp, normalised"], (2, 300, 4, 2)
    assert max(attack(kernel, FORMATS["fp32"], "constant v", shape, 0).values()) <= 1

    def never(form: Contract, c: Constants, keys: int) -> float:
        return contracts.rescale_error(form.with_fields(tile=keys), c, keys)

    monkeypatch.setattr(attention_bounds.forward, "rescale_error", never)
    assert max(attack(kernel, FORMATS["fp32"], "constant v", shape, 0).values()) > 1


def test_a_normalised_p_meets_a_sum_of_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # The sum of an earlier sweep was rescaled, the weights it divides were not: V does not cancel, even a constant one.
    kernel, shape = KERNELS["coarse exp, normalised"], (2, 300, 4, 2)
    monkeypatch.setattr(attention_bounds.forward, "sweeps_apart", lambda *_: 0.0)
    assert attack(kernel, FORMATS["fp32"], "constant v", shape, 0)["out"] > 1


# ---- the formula once more, in mpmath, from docs/bounds.md


FORMS = [
    pytest.param(form, fmt, id=f"{preset} {form.label}, {fmt}")
    for preset, fmts in (
        ("fp64", ("fp64",)),
        *((preset, ("fp32", "bf16", "fp16")) for preset in ("fp32", "flash", "sdpa_math", "eager")),
    )
    for form in preset_forms("attention", preset)
    for fmt in fmts
]


@pytest.mark.parametrize(("form", "fmt"), FORMS)
def test_the_bound_is_the_documented_formula(form: Contract, fmt: str) -> None:
    rng = np.random.default_rng(len(form.label))
    for inputs in ("normal", "massive", "small weights", "bias", "constant v"):
        case = stored(family(inputs, FORMATS[fmt], rng, (2, 21, 5, 2)), FORMATS[fmt])
        lse_format = FORMATS["bf16" if inputs == "massive" else "fp64" if fmt == "fp64" else "fp32"]
        block = refine(case, enclose(case)[0], np.ones(2, dtype=bool), 256)
        found = attention_bounds.bounds(case, block, (form,), {"out": FORMATS[fmt], "lse": lse_format})[0]
        with mpmath.workdps(50):
            for row in range(2):
                outs, lse = plain_bound(case, form, FORMATS[fmt], lse_format, row)
                for wanted, got in zip(
                    [*outs, lse], [*found["out"].bound[row], found["lse"].bound[row, 0]], strict=True
                ):
                    # Never below, and above by no more than what covers the roundings of its own evaluation.
                    assert wanted <= mpmath.mpf(float(got)) <= wanted * (1 + mpmath.mpf(10) ** -7), inputs


# ---- what a bound is made from


def test_radii_of_the_oracle_hardly_matter_and_never_lower_the_bound() -> None:
    rng = np.random.default_rng(3)
    for inputs in ("normal", "wide logits", "sink and needle"):
        case = stored(family(inputs, FORMATS["bf16"], rng, (3, 50, 8, 2)), FORMATS["bf16"])
        coarse, fine = enclose(case)[0], enclose(case, ar=arb_arithmetic(256))[0]
        for form in preset_forms("attention", "flash"):
            formats = {"out": FORMATS["bf16"], "lse": FORMATS["fp32"]}
            one, two = (attention_bounds.bounds(case, b, (form,), formats)[0] for b in (coarse, fine))
            for name in ("out", "lse"):
                assert (one[name].bound >= two[name].bound * (1 - 1e-9)).all()
                assert (one[name].bound <= two[name].bound * (1 + 1e-5)).all()


def test_a_few_rows_at_a_time_give_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    case = stored(family("bias", FORMATS["fp32"], rng, (17, 40, 8, 3)), FORMATS["fp32"])
    forms, formats = preset_forms("attention", "fp32"), {"out": FORMATS["fp32"]}
    block = refine(case, enclose(case)[0], np.arange(17) == 5, 128)
    whole = attention_bounds.bounds(case, block, forms, formats)
    monkeypatch.setattr(attention_bounds, "PAIRS", 120)
    monkeypatch.setattr(attention_bounds, "ROWS", 1)
    for one, two in zip(whole, attention_bounds.bounds(case, block, forms, formats), strict=True):
        for name in ("out", "lse"):
            assert one[name].bound.shape == two[name].bound.shape
            assert np.allclose(one[name].bound, two[name].bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
def test_looser_contracts_have_larger_bounds(fmt: str) -> None:
    rng = np.random.default_rng(5)
    for inputs in ("normal", "offset", "wide logits", "small weights"):
        case = stored(family(inputs, FORMATS[fmt], rng, (2, 40, 8, 3)), FORMATS[fmt])
        block = enclose(case)[0]

        def bound(block: Block = block, case: Case = case, **fields: Any) -> dict[str, Bounded]:
            form = Contract("flash", "plain").with_fields(**fields)
            return attention_bounds.bounds(case, block, (form,), {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})[0]

        strict = bound(weights="fp32")
        for looser in (
            {},
            {"qk_prescale": "input"},
            {"scores": "input", "score_stores": 1},
            {"exp": 2.0**-12},
            {"lag": 5.0},
            {"splits": 4},
            {"accumulator": "bf16"},
            {"flush": True},
            {"engine": "h100"},
        ):
            wide = bound(**looser)
            for name in ("out", "lse"):
                if name == "lse" or looser != {"engine": "h100"}:
                    assert (wide[name].bound >= strict[name].bound * (1 - 1e-12)).all(), looser


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("preset", ["fp32", "flash", "sdpa_math", "eager"])
def test_the_model_kernel_keeps_its_contract(preset: str, fmt: str) -> None:
    worst = 0.0
    for form in preset_forms("attention", preset):
        for seed, inputs in enumerate(FAMILIES):
            rng = np.random.default_rng(seed)
            case = stored(family(inputs, FORMATS[fmt], rng, (2, 40, 8, 2)), FORMATS[fmt])
            block, bounded = enclosed(case, form, {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})
            got = attention_case.model(case, block.key, block.rows, form)
            worst = max(worst, *ratios(got, block, bounded).values())
    assert 0 < worst <= 1


# ---- where a non-finite output is legal


def overflows(case: Case, form: Contract, fmt: str, lse: str = "fp32") -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    block = refine(case, enclose(case)[0], np.ones(1, dtype=bool), 256)
    found = attention_bounds.bounds(case, block, (form,), {"out": FORMATS[fmt], "lse": FORMATS[lse]})[0]
    return found["out"].may_overflow, found["lse"].may_overflow


def one_row(fmt: str, q: Any, k: Any, v: Any, **options: Any) -> Case:
    arrays = {
        n: FORMATS[fmt].store(np.array(a, dtype=np.float64))[None, None] for n, a in zip("qkv", (q, k, v), strict=True)
    }
    return Case("attention", arrays, options)


def test_where_overflow_is_legal() -> None:
    plain, eager = preset_forms("attention", "flash")[0], preset_forms("attention", "eager")[0]
    narrow = plain.with_fields(accumulator="fp16")
    modest = one_row("fp16", [[1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]])
    for form in (plain, eager, narrow):
        assert not any(x.any() for x in overflows(modest, form, "fp16"))
    # Raw scores of 90000 overflow where they are stored in fp16, and nowhere else.
    large = one_row("fp16", [[300.0, 0.0]], [[300.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]])
    assert overflows(large, eager, "fp16")[0].all()
    assert not overflows(large, plain, "fp16")[0].any()
    # An fp16 accumulator holds l times O.
    heavy = one_row("fp16", [[0.0]], [[0.0]] * 4, [[20000.0]] * 4)
    assert overflows(heavy, narrow, "fp16")[0].all()
    assert not overflows(heavy, plain, "fp16")[0].any()
    # A part of split keys knows its own maximum only: seven equal weights of 1, beside a key that makes them small.
    half = float(FORMATS["fp32"].max_finite) / 8
    apart = one_row("fp32", [[1.0]], [[30.0], *[[0.0]] * 7], [[1.0], *[[half]] * 7])
    assert overflows(apart, plain.with_fields(weights="fp32", splits=8), "fp32")[0].all()
    assert not overflows(apart, plain.with_fields(weights="fp32"), "fp32")[0].any()
    # Large scales overflow although sum |q||k| does not.
    steep = one_row("fp32", [[1e15]], [[1e15], [0.0]], [[1.0], [2.0]], scale=1e10)
    assert overflows(steep, plain.with_fields(weights="fp32"), "fp32")[0].all()
    # Lowest finite numbers as masks: legal only where all of a row is masked so, and base two loses its maximum.
    lowest = -3.4e38
    some = one_row("fp32", [[1.0]], [[1.0], [2.0]], [[1.0], [2.0]], attn_mask=np.float32([[[[lowest, 0.0]]]]))
    every = one_row("fp32", [[1.0]], [[1.0], [2.0]], [[1.0], [2.0]], attn_mask=np.float32([[[[lowest, lowest]]]]))
    mild = one_row("fp32", [[1.0]], [[1.0], [2.0]], [[1.0], [2.0]], attn_mask=np.float32([[[[-1e30, -1e30]]]]))
    form = plain.with_fields(weights="fp32")
    assert not overflows(some, form, "fp32")[0].any()
    assert not overflows(mild, form, "fp32")[0].any()
    assert overflows(every, form, "fp32")[0].all()


def test_values_near_the_largest_float64_are_not_judged_by_nan() -> None:
    top = np.finfo(np.float64).max * 0.9
    case = one_row("fp64", [[1.0]], [[1.0], [1.0]], [[top], [-top]])
    form = preset_forms("attention", "fp64")[0]
    block = enclose(case, ar=arb_arithmetic(256))[0]
    found = attention_bounds.bounds(case, block, (form,), {"out": FORMATS["fp64"], "lse": FORMATS["fp64"]})[0]
    assert not np.isnan(found["out"].bound).any()
    assert found["out"].may_overflow.all()


def test_a_row_sum_too_long_for_its_format_has_no_bound() -> None:
    # 150 additions with unit 2^-8 may lose everything.
    rng = np.random.default_rng(7)
    case = stored(family("normal", FORMATS["bf16"], rng, (2, 130, 3, 2)), FORMATS["bf16"])
    form = declared_forms("attention", {"preset": "flash", "row_sum": "bf16"}, "bf16")[0]
    found = attention_bounds.bounds(case, enclose(case)[0], (form,), {"out": FORMATS["bf16"]})[0]
    assert np.isposinf(found["out"].bound).all()
    assert np.isposinf(found["lse"].bound).all()


def test_empty_rows_promise_nothing_but_spoil_no_others() -> None:
    rng = np.random.default_rng(6)
    mask = np.ones((3, 4), dtype=bool)
    mask[1] = False
    q, k, v, _ = family("normal", FORMATS["fp32"], rng, (3, 4, 2, 2))
    case = stored((q, k, v, {"attn_mask": mask}), FORMATS["fp32"])
    block = enclose(case)[0]
    found = attention_bounds.bounds(case, block, preset_forms("attention", "fp32"), {"out": FORMATS["fp32"]})
    for bounded in found:
        for name in ("out", "lse"):
            assert np.isfinite(bounded[name].bound[~block.empty]).all()
            assert (bounded[name].bound[~block.empty] < 1e-4).all()
