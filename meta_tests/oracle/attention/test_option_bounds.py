"""Attention's bounds under soft caps, ALiBi, biases, sinks and windows: honest kernels, broken ones, needed terms.

Every kernel of `honest_attention` meets the families of `attention_attack` with options added, in each of the ways in
which kernels make them. ``-m deep`` runs more seeds. Worst ratios: docs/bounds.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.attention_attack import FAMILIES, Given, enclosed, family, form_of, outputs, ratios, stored
from meta_tests.kernels.honest_attention import KERNELS, Kernel
from meta_tests.witnesses.plain_bound import plain_bound
from oracle.bounds.attention import output as attention_bounds
from oracle.bounds.attention.scores import tanh_moves
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Format
from oracle.ops.contracts import declared_forms, preset_forms

SHAPES = ((2, 1, 1, 2), (2, 2, 3, 1), (3, 7, 8, 2), (2, 33, 2, 3), (2, 64, 16, 2))
OPTIONS = ("cap", "alibi", "sink", "sink and cap", "alibi and cap", "all")
TANHS = ("numpy", "ratio", "sigmoid", "one minus", "approximate")
SINKS = ("first", "last", "outside", "sigmoid", "sigmoid stored", "late")


def with_options(given: Given, which: str, fmt: Format, rng: np.random.Generator) -> Given:
    """The input with options added; sinks near the row maximum, beside it, or far from it."""
    q, k, v, options = given
    options = dict(options)
    wide = rng.choice(["fp32", "fp64", fmt.name])
    if "cap" in which or which == "all":
        options["softcap"] = float(rng.choice([0.1, 1.0, 5.0, 30.0, 50.0, 1e4]))
        options["softcap_order"] = str(rng.choice(["before_mask", "after_mask"]))
    if "alibi" in which or which == "all":
        slope = float(rng.choice([2.0**-8, 2.0**-3, 1 / 3, 0.9, 5.0, 100.0]))
        options["alibi_slopes"] = FORMATS[wide].store(np.array([slope]))
        options["is_causal"] = bool(rng.random() < 0.7)
        options["causal_alignment"] = str(rng.choice(["top_left", "bottom_right"]))
    if "sink" in which or which == "all":
        with np.errstate(all="ignore"):
            top = float(np.clip((q @ k.T).max() / np.sqrt(q.shape[1]), -1e4, 1e4))
        near = top + 2 * rng.standard_normal()
        sink = rng.choice([near, near, 0.0, -3.0, top + 20, top - 30, top + 80, top - 100, 1e4])
        options["sinks"] = FORMATS[wide].store(np.array([sink]))
        options["lse_sink"] = str(rng.choice(["included", "included", "excluded"]))
    if which == "all":
        options["window_size"] = (int(rng.integers(-1, 9)), int(rng.integers(-1, 9)))
        options["window_left"] = str(rng.choice(["included", "excluded"]))
    return q, k, v, options


def variant(kernel: Kernel, which: str, case: Case, rng: np.random.Generator) -> Kernel:
    """The kernel with one of the ways in which each option is made, and the contract that says so."""
    more: dict[str, Any] = {}
    contract = dict(kernel.contract)
    if "softcap" in case.options:
        more["tanh"] = str(rng.choice(TANHS))
        if more["tanh"] == "approximate":
            contract["tanh"] = kernel.tanh_error
        if kernel.spite == "none":
            more["spite"] = str(rng.choice(["none", "tanh", "tanh low"]))
    if "alibi_slopes" in case.options:
        more["alibi"] = str(rng.choice(["distance", "folded", "key index"]))
    if "sinks" in case.options:
        ways = [way for way in SINKS if way != ("outside" if kernel.splits > 1 else "late")]
        more["sink"] = "first" if kernel.stores else str(rng.choice(ways))
        if more["sink"] == "sigmoid stored":
            contract["output_stores"] = 2
    if kernel.stores and kernel.exponent == "natural" and rng.random() < 0.5:
        more["shifted"] = True
        contract["shifted"] = "input"
    return replace(kernel, contract=contract, **more)


def attack(kernel: Kernel, fmt: Format, which: str, name: str, shape: Any, seed: int) -> dict[str, Any]:
    """Error over bound by output, and what was drawn."""
    rng = np.random.default_rng([seed, FAMILIES.index(name), OPTIONS.index(which), *shape])
    case = stored(with_options(family(name, fmt, rng, shape), which, fmt, rng), fmt)
    kernel = variant(kernel, which, case, rng)
    watched = ["out", "lse"]
    if kernel.alibi == "key index":
        # The same O only where no key comes later and no sink or cap follows; the same L for those who say so.
        apart = "sinks" in case.options or case.options.get("softcap_order") == "after_mask"
        case = case.with_options(is_causal=True)
        if apart or rng.random() < 0.5:
            case = case.with_options(alibi_bias="key_index")
        else:
            watched = ["out"]
    form = form_of(kernel, fmt)
    block, bounded = enclosed(case, form, {"out": fmt, "lse": FORMATS[kernel.compute]})
    if kernel.sink == "outside":
        scores = np.where(block.visible_keys(), block.part("scores").hi, -np.inf)
        if "sinks" in case.options and (case.options["sinks"][0] - scores.max(axis=1) > 80).any():
            # It would overflow, and is not honest there.
            kernel = replace(kernel, sink="last")
    found = ratios(outputs(kernel, fmt, case, block, seed), block, bounded)
    return {**{n: found[n] for n in watched}, "drawn": (kernel.tanh, kernel.alibi, kernel.sink)}


def worst_of(kernel: Kernel, seeds: range) -> dict[tuple[Any, ...], float]:
    worst: dict[tuple[Any, ...], float] = {}
    for seed in seeds:
        for index, name in enumerate(FAMILIES):
            fmt = FORMATS[kernel.formats[(seed + index) % len(kernel.formats)]]
            which = OPTIONS[(seed + 2 * index + index // 6) % len(OPTIONS)]
            shape = SHAPES[(seed * 3 + index) % len(SHAPES)]
            found = attack(kernel, fmt, which, name, shape, seed)
            for output in ("out", "lse"):
                place = (which, name, fmt.name, output, seed, *found["drawn"])
                worst[place] = max(found.get(output, 0.0), worst.get(place, 0.0))
    return worst


@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound(name: str) -> None:
    worst = worst_of(KERNELS[name], range(3))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}
    assert max(worst.values()) > 0.05


@pytest.mark.deep
@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound_in_a_long_run(name: str) -> None:
    worst = worst_of(KERNELS[name], range(3, 60))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}


@pytest.mark.parametrize("name", ["blas", "fma", "split 8", "normalised", "rounded sum", "lazy", "eager"])
@pytest.mark.parametrize("which", ["cap", "sink", "all"])
def test_long_rows_keep_their_bounds(name: str, which: str) -> None:
    kernel = replace(KERNELS[name], order="blas", tile=max(KERNELS[name].tile, 64))
    fmt = FORMATS[kernel.formats[-1]]
    for inputs in ("sink and needle", "growing"):
        found = attack(kernel, fmt, which, inputs, (4, 1024, 64, 4), 0)
        assert max(found[name] for name in ("out", "lse") if name in found) <= 1


# ---- what must exceed


def case_with(fmt: str, seed: int, **options: Any) -> Case:
    rng = np.random.default_rng(seed)
    given = family("normal", FORMATS[fmt], rng, (12, 24, 8, 4))
    return stored((*given[:3], options), FORMATS[fmt])


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], Kernel]] = {
    # What the case asks for, what the kernel does instead, and the kernel.
    "no cap": ({"softcap": 2.0}, {"softcap": None}, KERNELS["fma"]),
    "tanh of S times the cap": ({"softcap": 2.0, "scale": 0.5}, {"softcap": 1.0, "scale": 0.5}, KERNELS["fma"]),
    "a cap that is off by two parts in a hundred": ({"softcap": 5.0}, {"softcap": 5.1}, KERNELS["scaled"]),
    "cap after the mask": ({"softcap": 2.0}, {"softcap": 2.0, "softcap_order": "after_mask"}, KERNELS["blas"]),
    "cap before the mask": (
        {"softcap": 2.0, "softcap_order": "after_mask"},
        {"softcap_order": "before_mask"},
        KERNELS["blas"],
    ),
    "sink dropped": ({"sinks": np.array([0.5])}, {}, replace(KERNELS["fma"], sink="dropped")),
    "a small sink dropped": ({"sinks": np.array([-4.0])}, {}, replace(KERNELS["fma"], sink="dropped")),
    "sink counted in each split": ({"sinks": np.array([0.5])}, {}, replace(KERNELS["split 2"], sink="each split")),
    "sink times the scale": ({"sinks": np.array([1.0])}, {"sinks": np.array([8**-0.5])}, KERNELS["fma"]),
    "window one too far": ({"window_size": (3, 0)}, {"window_size": (4, 0)}, KERNELS["fma"]),
    "window one short": ({"window_size": (3, 0)}, {"window_size": (2, 0)}, KERNELS["fma"]),
    "window's own edge": ({"window_size": (3, 2)}, {"window_size": (3, 2), "window_left": "excluded"}, KERNELS["fma"]),
    "window from the other corner": (
        {"window_size": (6, 6)},
        {"window_size": (6, 6), "causal_alignment": "bottom_right"},
        KERNELS["fma"],
    ),
    "another head's slope": ({"alibi_slopes": np.array([0.25])}, {"alibi_slopes": np.array([0.5])}, KERNELS["fma"]),
    "slope in base two": (
        {"alibi_slopes": np.array([0.25])},
        {"alibi_slopes": np.array([0.25 / np.log(2)])},
        KERNELS["fma"],
    ),
    "alibi of signed distance": (
        {"alibi_slopes": np.array([0.25])},
        {"alibi_slopes": np.array([0.25]), "alibi_bias": "key_index"},
        replace(KERNELS["fma"], alibi="key index"),
    ),
}


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_kernel_of_another_function_exceeds_the_bound(name: str, fmt: str) -> None:
    asked, done, kernel = BROKEN[name]
    worst = 0.0
    for seed in range(3):
        bias = {}
        if "cap" in name and "mask" in name:
            bias = {"attn_mask": 2 * np.random.default_rng(seed).standard_normal((12, 24))}
        case = case_with(fmt, seed, **asked, **bias)
        form = form_of(kernel, FORMATS[fmt])
        block, bounded = enclosed(case, form, {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})
        other = case.with_options(**done) if done else case
        got = outputs(kernel, FORMATS[fmt], other, enclose(other)[0])
        found = ratios(got, block, bounded)
        # In 16 bits some of them show in L alone.
        worst = max(worst, found["out"] if fmt == "fp32" else max(found.values()))
    assert worst > 1


UNDECLARED: dict[str, tuple[Kernel, str, str, dict[str, Any]]] = {
    # A kernel whose contract does not say what it does; format, output, and what the case asks for.
    "approximate tanh": (replace(KERNELS["fma"], tanh="approximate"), "bf16", "lse", {"softcap": 5.0}),
    "S - m stored": (replace(KERNELS["sqrt scale"], shifted=True), "bf16", "lse", {"sinks": np.array([0.5])}),
    "O renormalised after it was stored": (
        replace(KERNELS["uncast"], sink="sigmoid stored"),
        "bf16",
        "out",
        {"sinks": np.array([0.5]), "scale": 0.01},
    ),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_a_broken_promise_exceeds_the_bound(name: str) -> None:
    kernel, fmt, output, options = UNDECLARED[name]
    worst = 0.0
    for seed in range(10):
        case = case_with(fmt, seed, **options)
        form = preset_forms("attention", str(kernel.contract.get("preset", "flash")))[0]
        block, bounded = enclosed(case, form, {"out": FORMATS[fmt], "lse": FORMATS["fp32"]})
        worst = max(worst, ratios(outputs(kernel, FORMATS[fmt], case, block), block, bounded)[output])
    assert worst > 1


# ---- the formula once more


def reference_cases(fmt: Format) -> list[Case]:
    rng = np.random.default_rng(9)
    base = family("normal", fmt, rng, (3, 21, 5, 2))[:3]
    bias = 2 * rng.standard_normal((3, 21))
    sink, slope = np.array([0.7]), np.array([0.3])
    options: list[dict[str, Any]] = [
        {"softcap": 2.0},
        {"softcap": 0.01},
        {"softcap": 1e4, "attn_mask": bias},
        {"softcap": 2.0, "attn_mask": bias, "softcap_order": "after_mask", "alibi_slopes": slope},
        {"alibi_slopes": slope, "is_causal": True, "causal_alignment": "bottom_right"},
        {"alibi_slopes": slope, "alibi_bias": "key_index", "attn_mask": bias},
        {"alibi_slopes": slope, "softcap": 3.0, "attn_mask": bias, "scale": 2.5},
        {"sinks": sink},
        {"sinks": sink + 40, "lse_sink": "excluded"},
        {"sinks": sink - 200, "attn_mask": bias},
        {"sinks": sink + 200},
        {"sinks": sink, "softcap": 2.0, "attn_mask": bias, "alibi_slopes": slope, "window_size": (3, 5)},
    ]
    return [stored((*base, given), fmt) for given in options]


REFERENCE = [
    pytest.param({"preset": preset, **more}, fmt, id=f"{preset} {fmt} {' '.join(more)}")
    for preset, fmt in (("fp64", "fp64"), ("fp32", "fp32"), ("flash", "bf16"), ("sdpa_math", "fp16"), ("eager", "bf16"))
    for more in ({}, {"tanh": 2.0**-11, "tanh_abs": 0.0, "shifted": "input", "output_stores": 2})
]


@pytest.mark.parametrize(("contract", "fmt"), REFERENCE)
def test_the_bound_is_the_documented_formula(contract: dict[str, Any], fmt: str) -> None:
    lse_format = FORMATS["fp64" if fmt == "fp64" else "fp32"]
    forms = declared_forms("attention", contract, fmt)
    for case in reference_cases(FORMATS[fmt]):
        block = refine(case, enclose(case)[0], np.ones(3, dtype=bool), 256)
        found = attention_bounds.bounds(case, block, forms, {"out": FORMATS[fmt], "lse": lse_format})
        for form, bounded in zip(forms, found, strict=True):
            with mpmath.workdps(50):
                outs, lse = plain_bound(case, form, FORMATS[fmt], lse_format, 1)
                got = [*bounded["out"].bound[1], bounded["lse"].bound[1, 0]]
                for wanted, one in zip([*outs, lse], got, strict=True):
                    value = mpmath.mpf(float(one))
                    assert wanted <= value <= wanted * (1 + mpmath.mpf(10) ** -6), (case.options, form.label)


def test_tanh_moves_is_the_most_that_tanh_can_move() -> None:
    rng = np.random.default_rng(4)
    # tanh of 1000 differs from 1 after 868 digits.
    with mpmath.workdps(950):
        for _ in range(300):
            low = float(10.0 ** rng.uniform(-12, 3)) * float(rng.random() < 0.9)
            high = low * float(rng.choice([1.0, 1.0, 1 + 1e-12, 1.5]))
            error = float(10.0 ** rng.uniform(-18, 3))
            found = mpmath.mpf(float(tanh_moves(*(np.array([x]) for x in (low, high, error)))[0]))
            places = [mpmath.mpf(low), mpmath.mpf(high), mpmath.mpf(min(max(error / 2, low), high))]
            most = max(mpmath.tanh(x) - mpmath.tanh(x - error) for x in places)
            assert found >= most * (1 - mpmath.mpf(2) ** -47) - mpmath.mpf(10) ** -300
            assert found <= most * (1 + mpmath.mpf(10) ** -11) + mpmath.mpf(10) ** -300
            inside = mpmath.mpf(low) + (mpmath.mpf(high) - low) * float(rng.random())
            step = error * float(rng.uniform(-1, 1))
            assert abs(mpmath.tanh(inside + step) - mpmath.tanh(inside)) <= found * (1 + mpmath.mpf(2) ** -47) + 1e-300


# ---- what an option must not cost


def test_a_dominating_sink_over_masked_keys_has_a_sharp_bound() -> None:
    # p of every key is 0, O is 0, and an error of L_k = -1e30 matters to neither O nor L.
    case = case_with("fp32", 0, sinks=np.array([0.5]), attn_mask=np.full((12, 24), -1e30))
    for form in preset_forms("attention", "fp32"):
        _, found = enclosed(case, form, {"out": FORMATS["fp32"], "lse": FORMATS["fp32"]})
        assert (found["out"].bound < 1e-30).all()
        assert (found["lse"].bound < 1e-5).all()


def test_options_that_change_nothing_cost_nothing() -> None:
    # A tanh without absolute error: that of other forms is relative to the cap, and shows where scores are small.
    form = declared_forms("attention", {"preset": "fp32", "tanh_abs": 0.0}, "fp32")[:1]
    base = case_with("fp32", 1)

    def bound(**options: Any) -> dict[str, Any]:
        case = base.with_options(**options)
        found = attention_bounds.bounds(case, enclose(case)[0], form, {"out": FORMATS["fp32"]})[0]
        return {name: found[name].bound for name in ("out", "lse")}

    plain = bound()
    for options, factor in (
        ({"window_size": (-1, -1)}, 1.0),
        ({"sinks": np.array([-np.inf])}, 1.0),
        ({"sinks": np.array([-80.0])}, 1.6),
        ({"softcap": 100.0}, 2.0),
        ({"alibi_slopes": np.array([0.0])}, 1.3),
    ):
        for name, wide in bound(**options).items():
            assert (wide <= plain[name] * factor * (1 + 1e-9)).all(), (options, name)


def test_where_overflow_is_legal_with_a_sink() -> None:
    top = float(FORMATS["fp32"].max_finite) / 4
    q, k, v = np.zeros((1, 2)), np.zeros((8, 2)), np.full((8, 1), top)
    case = stored((q, k, v, {"sinks": np.array([50.0])}), FORMATS["fp32"])
    forms = preset_forms("attention", "fp32")
    found = attention_bounds.bounds(case, enclose(case)[0], forms, {"out": FORMATS["fp32"]})
    # The sum of eight times a quarter of the range is formed before a sink that comes last makes it small.
    assert [bool(f["out"].may_overflow.all()) for f in found] == [not form.weights.normalised for form in forms]
    small = stored((q, k, v / 64, {"sinks": np.array([50.0])}), FORMATS["fp32"])
    found = attention_bounds.bounds(small, enclose(small)[0], forms, {"out": FORMATS["fp32"]})
    assert not any(f["out"].may_overflow.any() for f in found)


def test_alibi_that_is_not_declared_covers_both_of_its_forms() -> None:
    forms = [*preset_forms("attention", "fp32"), *preset_forms("attention", "eager")]
    base = case_with("fp32", 2, is_causal=True, causal_alignment="bottom_right", alibi_slopes=np.array([0.5]))
    bounds = {}
    for name in (None, "distance", "key_index"):
        case = base if name is None else base.with_options(alibi_bias=name)
        bounds[name] = attention_bounds.bounds(case, enclose(case)[0], forms, {"out": FORMATS["fp32"]})
    for either, *declared in zip(bounds[None], bounds["distance"], bounds["key_index"], strict=True):
        for one in declared:
            assert (either["out"].bound >= one["out"].bound * (1 - 1e-9)).all()
    assert (bounds[None][2]["out"].bound > bounds["distance"][2]["out"].bound).any()


def test_masks_of_the_lowest_number_beside_a_sink() -> None:
    # In base two such scores overflow: with all of a row's keys at -3e38 a kernel may lose their maximum, and its L.
    lowest = np.full((2, 3), -3e38)
    lowest[0, 0] = 0.0
    for options in ({}, {"lse_sink": "excluded"}):
        given = (np.ones((2, 2)), np.ones((3, 2)), np.ones((3, 1)), {"attn_mask": lowest, "sinks": np.array([1.0])})
        case = stored(given, FORMATS["fp32"]).with_options(**options)
        _, found = enclosed(case, preset_forms("attention", "fp32")[0], {"out": FORMATS["fp32"]})
        for name in ("out", "lse"):
            assert found[name].may_overflow[:, 0].tolist() == [False, True]


def test_values_whose_sum_is_beyond_float64_promise_nothing_and_fail_nobody() -> None:
    v = np.full((40, 1), 7e307)
    v[::2] *= -1
    k = np.linspace(0, 400, 40)[:, None]
    case = stored((np.ones((1, 1)), k, v, {"sinks": np.array([1.0])}), FORMATS["fp64"])
    for form in preset_forms("attention", "fp64"):
        _, found = enclosed(case, form, {"out": FORMATS["fp64"], "lse": FORMATS["fp64"]})
        assert not np.isnan(found["out"].bound).any()
