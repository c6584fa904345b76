"""The attack on attention's bounds: families of inputs, one honest kernel on one case, error over bound.

Used by `test_bound_soundness` (plain attention) and `test_option_bounds` (soft cap, ALiBi, sinks, windows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meta_tests.kernels.honest_attention import Kernel, run
from meta_tests.kernels.honest_options import Options
from oracle.block import Block
from oracle.bounds.attention import output as attention_bounds
from oracle.bounds.bounded import Bounded
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Float64Array, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.contracts import declared_forms

Given = tuple[Float64Array, Float64Array, Float64Array, dict[str, Any]]


# ---- inputs: the families of docs/bounds.md


def family(name: str, fmt: Format, rng: np.random.Generator, shape: tuple[int, int, int, int]) -> Given:
    """q [Sq, D], k [Sk, D], v [Sk, Dv] and options; ``shape``: Sq, Sk, D, Dv."""
    sq, sk, d, dv = shape
    q, k, v = rng.standard_normal((sq, d)), rng.standard_normal((sk, d)), rng.standard_normal((sk, dv))
    options: dict[str, Any] = {}
    top, low = fmt.max_finite, fmt.smallest_normal
    match name:
        case "normal":
            pass
        case "massive":
            q, k = q * np.where(rng.random(d) < 0.2, 20, 1), k * np.where(rng.random(d) < 0.2, 20, 1)
        case "tiny":
            q, k, v = q * 1e-3, k * 1e-3, v * 1e-3
        case "offset":
            q[:, 0], k[:, 0] = 200.0, 200.0 * rng.choice([-1, 1])
        case "wide logits":
            q = q * rng.choice([5, 30, 1000])
        case "extreme logits":
            q, k = q * min(3e4, top / 100), k * 100
        case "ties":
            k[rng.integers(1, 3) - 1 :: 2] = k[:1]
        case "growing":
            q[:, 0], k[:, 0] = 10, np.linspace(0, rng.choice([5, 50]), sk)
        case "falling":
            q[:, 0], k[:, 0] = 10, np.linspace(rng.choice([5, 50]), 0, sk)
        case "constant v":
            v[:] = v[:1]
        case "one hot":
            v[:] = 0
            v[rng.integers(sk)] = 1.0
        case "cancelling":
            pairs = d // 2
            q[:, 1 : 2 * pairs : 2] = q[:, 0 : 2 * pairs : 2]
            k[:, 1 : 2 * pairs : 2] = -k[:, 0 : 2 * pairs : 2] * (1 + 2.0**-10 * rng.standard_normal((sk, pairs)))
            q, k = q * 30, k * 30
        case "subnormal v":
            v = v * low * rng.choice([0.01, 0.1, 1, 4])
        case "subnormal q":
            q, k = q * low * rng.choice([4, 0.05]), k * min(top / 8, 2.0**120)
        case "subnormal everything":
            q, k, v = q * low, k * low, v * low
        case "near the largest":
            v = np.sign(v) * top * (1 - 0.1 * rng.random(v.shape)) * rng.choice([1, 0.4])
        case "sink and needle":
            q[:, 0], k[:, 0], v = 8, -2, v * 0.05
            k[0, 0] = k[rng.integers(sk), 0] = 3
            v[rng.integers(sk)] = 10.0
        case "tail mass":
            q[:, 0], k[:, 0] = 8, -rng.uniform(1, 3)
            k[0, 0] = 0.0
        case "weights that underflow":
            q[:, 0], k[:, 0] = 10, -rng.uniform(*rng.choice([[1, 2], [5, 11], [8.8, 11]]), sk) * np.sqrt(d)
            k[0, 0], v[0], v[1:] = 0, 0, v[1:] * min(top / 8, 1e36)
        case "small weights":
            q[:, 0], k[:, 0] = 10, -rng.uniform(0.5, 2, sk)
            k[0, 0], v[0] = 0, 0
        case "bias":
            options["attn_mask"] = 3 * rng.standard_normal((sq, sk))
        case "bias as a mask":
            lowest = rng.choice([-1e30, -3e38, -65504.0, -1e4])
            options["attn_mask"] = np.where(rng.random((sq, sk)) < 0.5, lowest, rng.standard_normal((sq, sk)))
        case "rows masked by a bias":
            options["attn_mask"] = np.full((sq, sk), rng.choice([-1e30, -65504.0, 1e4])) + rng.standard_normal((sq, sk))
        case "boolean mask":
            options["attn_mask"] = rng.random((sq, sk)) < 0.5
        case "scale":
            options["scale"] = float(rng.choice([0.0, 1e-3, 1.0, 17.0]))
        case _:
            raise ValueError(name)
    return q, k, v, options


FAMILIES = (
    "normal",
    "massive",
    "tiny",
    "offset",
    "wide logits",
    "extreme logits",
    "ties",
    "growing",
    "falling",
    "constant v",
    "one hot",
    "cancelling",
    "subnormal v",
    "subnormal q",
    "subnormal everything",
    "near the largest",
    "sink and needle",
    "tail mass",
    "weights that underflow",
    "small weights",
    "bias",
    "bias as a mask",
    "rows masked by a bias",
    "boolean mask",
    "scale",
)


def stored(given: Given, fmt: Format) -> Case:
    q, k, v, options = given
    arrays = {
        n: fmt.store(np.clip(a, -fmt.max_finite, fmt.max_finite))[None, None]
        for n, a in zip("qkv", (q, k, v), strict=True)
    }
    mask = options.get("attn_mask")
    if mask is not None:
        held = mask if mask.dtype == np.bool_ else fmt.store(np.clip(mask, -fmt.max_finite, fmt.max_finite))
        options = {**options, "attn_mask": held[None, None]}
    return Case("attention", arrays, options)


# ---- one kernel on one case


def form_of(kernel: Kernel, fmt: Format) -> Contract:
    """The form of the kernel's own contract that it evaluates."""
    for form in declared_forms("attention", dict(kernel.contract), fmt.name):
        same = (form.weights.normalised, form.sums.splits > 1, form.sums.row_sum == "rounded", form.sums.lag > 0)
        if same == (kernel.normalised, kernel.splits > 1, kernel.rounded_sum, kernel.lag > 0):
            return form
    raise AssertionError(f"no form of {kernel.contract} fits the kernel")


def enclosed(case: Case, form: Contract, formats: Mapping[str, Format]) -> tuple[Block, dict[str, Bounded]]:
    """The only block, precise enough for its bound."""
    block = enclose(case)[0]
    for precision in (128, 512, 1024):
        found = attention_bounds.bounds(case, block, (form,), formats)[0]
        coarse = np.zeros(len(block.rows), dtype=bool)
        with np.errstate(all="ignore"):
            for name in ("out", "lse"):
                coarse |= ~(block.part(name).rad <= found[name].bound / 1000).all(axis=1)
        coarse &= ~block.empty
        if not coarse.any():
            break
        block = refine(case, block, coarse, precision)
    return block, attention_bounds.bounds(case, block, (form,), formats)[0]


def outputs(kernel: Kernel, fmt: Format, case: Case, block: Block, seed: int = 0) -> dict[str, Float64Array]:
    """O and L of the kernel; L without the sink where the case says so."""
    x = attention_case.head(case, block.key, block.rows)
    push: Any = 0.0
    if kernel.spite == "weights":
        push = np.sign(x.v[None, :, 0] - block.part("out").hi[:, 0, None]) if seed % 2 else np.ones(x.visible.shape)
    shift = x.k.shape[0] - case.arrays["q"].shape[2] if case.options.get("causal_alignment") == "bottom_right" else 0
    distance = np.abs(block.rows[:, None] + shift - np.arange(x.k.shape[0])[None, :]).astype(np.float64)
    last = case.options.get("softcap_order") == "after_mask"
    options = Options(x.bias, case.options.get("softcap"), last, x.slope, distance, x.sink)
    alpha = attention_case.scale_float(case)

    def given(how: Options) -> Any:
        return run(kernel, fmt, x.q, x.k, x.v, alpha=alpha, visible=x.visible, options=how, push=push)

    found = given(options)
    bare = x.sink is not None and case.options.get("lse_sink") == "excluded"
    lse = given(replace(options, sink=None)).lse if bare else found.lse
    return {"out": found.out.astype(np.float64), "lse": lse.astype(np.float64)}


def ratios(got: Mapping[str, Float64Array], block: Block, bounded: Mapping[str, Bounded]) -> dict[str, float]:
    """Per output the largest error / bound that is certain (distance less radius), over rows that have a value."""
    result = {}
    for name, y in got.items():
        part, promise = block.part(name), bounded[name]
        with np.errstate(all="ignore"):
            certain = np.maximum(part.distance(y) - part.rad, 0.0)
            ratio = np.where(certain > 0, certain / promise.bound, 0.0)
        ratio = np.where(np.isfinite(y) & ~np.isnan(ratio), ratio, np.inf)
        legal = promise.may_overflow & ~np.isfinite(y)
        result[name] = float(np.where(legal | block.empty[:, None], 0.0, ratio).max(initial=0.0))
    return result


def attack(kernel: Kernel, fmt: Format, name: str, shape: tuple[int, int, int, int], seed: int) -> dict[str, float]:
    rng = np.random.default_rng([seed, FAMILIES.index(name), *shape])
    case = stored(family(name, fmt, rng, shape), fmt)
    form = form_of(kernel, fmt)
    block, bounded = enclosed(case, form, {"out": fmt, "lse": FORMATS[kernel.compute]})
    return ratios(outputs(kernel, fmt, case, block, seed), block, bounded)
