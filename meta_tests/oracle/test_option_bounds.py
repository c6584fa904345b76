"""Attention's bounds under soft caps, ALiBi, biases, sinks and windows: honest kernels, broken ones, needed terms.

Every kernel of `honest_attention` meets the families of `attention_attack` with options added, in each of the ways in
which kernels make them. ``-m deep`` runs more seeds. Worst ratios: docs/bounds.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.oracle.attention_attack import FAMILIES, Given, enclosed, family, form_of, outputs, ratios, stored
from meta_tests.oracle.honest_attention import KERNELS, Kernel
from oracle.case import Case
from oracle.formats import FORMATS, Format

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
