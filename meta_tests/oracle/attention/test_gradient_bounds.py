"""Gradients of attention: bounds against honest and broken kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meta_tests.kernels.honest_backward import KERNELS, Backward, run
from oracle.block import Block
from oracle.bounds.attention.gradient import bounds
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Float64Array, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients
from oracle.ops.contracts import declared_forms

FAMILIES = (
    "normal",
    "large logits",
    "ties",
    "sink and needle",
    "tiny dO",
    "one-signed",
    "one hot",
    "cancelling dP",
    "subnormal",
    "softcap",
    "sinks",
    "bias",
    "causal",
)


def drawn(name: str, fmt: Format, rng: np.random.Generator) -> Case:
    sq, sk = int(rng.choice([1, 2, 5, 17])), int(rng.choice([1, 3, 16, 33]))
    d, dv, group = int(rng.choice([1, 3, 16])), int(rng.choice([1, 2, 8])), int(rng.choice([1, 2]))
    a = {
        "q": rng.standard_normal((1, group, sq, d)),
        "k": rng.standard_normal((1, 1, sk, d)),
        "v": rng.standard_normal((1, 1, sk, dv)),
        "do": rng.standard_normal((1, group, sq, dv)),
    }
    options: dict[str, Any] = {}
    match name:
        case "large logits":
            a["q"] *= float(rng.choice([5.0, 20.0]))
        case "ties":
            a["k"][:] = a["k"][:, :, :1]
        case "sink and needle":
            a["q"][..., 0], a["k"][..., 0] = 3.0, -2.0
            a["k"][..., 0, 0] = 3.0
            a["v"] *= 0.05
            a["v"][..., -1, :] = 8.0
        case "tiny dO":
            a["do"] *= fmt.smallest_normal * float(rng.choice([1, 100, 1e4]))
        case "one-signed":
            a["v"], a["do"] = np.abs(a["v"]), np.abs(a["do"])
        case "one hot":
            a["v"][:], a["do"][:] = 0, 0
            a["v"][..., -1, 0], a["do"][..., 0, 0] = 1, 1
        case "cancelling dP":
            # All values nearly alike: dP - D is a small difference of large numbers.
            a["v"] = 30.0 + 2.0**-6 * a["v"]
        case "subnormal":
            a["v"] *= fmt.smallest_normal * 4
        case "softcap":
            options["softcap"] = float(rng.choice([0.5, 3.0, 30.0]))
            a["q"] *= float(rng.choice([1.0, 10.0]))
        case "sinks":
            options["sinks"] = fmt.store(3 * rng.standard_normal(group))
        case "bias":
            options["attn_mask"] = fmt.store(2 * rng.standard_normal((1, group, sq, sk)))
        case "causal":
            options["is_causal"] = True
    return Case("attention_backward", {n: fmt.store(x) for n, x in a.items()}, options)


def computed(kernel: Backward, fmt: Format, case: Case) -> dict[str, Float64Array]:
    """All outputs of the kernel, rounded to the format; shared keys sum over their group."""
    heads = case.arrays["q"].shape[1]
    bias, sinks = gradients.bias_of(case), case.options.get("sinks")
    found = []
    for h in range(heads):
        x = attention_case.head(case, (0, h), np.arange(case.arrays["q"].shape[2]))
        do = case.arrays["do"][0, h].astype(np.float64)
        more = {"softcap": case.options.get("softcap"), "sink": None if sinks is None else float(sinks[h])}
        alpha = attention_case.scale_float(case)
        found.append(run(kernel, fmt, x.q, x.k, x.v, do, alpha=alpha, visible=x.visible, bias=x.bias, **more))
    stored = lambda a: np.asarray(a.astype(fmt.dtype).astype(np.float64))  # noqa: E731
    result = {"dq": stored(np.stack([g.dq for g in found])[None])}
    for name in ("dk", "dv"):
        parts = [getattr(g, name) for g in found]
        if heads > 1 and kernel.parts_stored:
            parts = [p.astype(fmt.dtype).astype(p.dtype) for p in parts]
        result[name] = stored(np.sum(parts, axis=0, dtype=parts[0].dtype)[None, None])
    if bias is not None:
        result["dbias"] = stored(np.stack([g.dbias for g in found])[None])
    if sinks is not None:
        result["dsinks"] = stored(np.array([g.dsink[0, 0] for g in found]))
    return result


def ratios(kernel: Backward, fmt: Format, case: Case) -> dict[str, float]:
    """Largest certain error / bound per output, in the form that the kernel evaluates."""
    forms = declared_forms("attention_backward", dict(kernel.contract), fmt.name)
    form = forms[kernel.form if kernel.form < len(forms) else 0]
    seen, worst = computed(kernel, fmt, case), {}
    for block in enclose(case):
        fine = _fine(case, block)
        bounded = bounds(case, block, (form,), dict.fromkeys(block.outputs or (), fmt))[0]
        for name in block.outputs or ():
            part, y = fine.part(name), fine.take(name, seen[name])
            with np.errstate(all="ignore"):
                certain = np.maximum(part.distance(y) - part.rad, 0.0)
                ratio = np.where(certain > 0, certain / bounded[name].bound, 0.0)
            ratio = np.where(np.isfinite(y), ratio, np.inf)
            dead = block.empty[:, None] | (bounded[name].may_overflow & ~np.isfinite(y))
            worst[name] = max(worst.get(name, 0.0), float(np.where(dead, 0.0, ratio).max(initial=0.0)))
    return worst


def _fine(case: Case, block: Block) -> Block:
    return refine(case, block, np.ones(len(block.rows), dtype=bool), 128)


def attacked(kernel: Backward, seeds: range) -> dict[tuple[str, str, str], float]:
    worst: dict[tuple[str, str, str], float] = {}
    for seed in seeds:
        for index, name in enumerate(FAMILIES):
            fmt = FORMATS[kernel.formats[(seed + index) % len(kernel.formats)]]
            case = drawn(name, fmt, np.random.default_rng([seed, index]))
            for output, ratio in ratios(kernel, fmt, case).items():
                worst[name, fmt.name, output] = max(ratio, worst.get((name, fmt.name, output), 0.0))
    return worst


@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound(name: str) -> None:
    worst = attacked(KERNELS[name], range(3))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}
    # An attack that comes nowhere near would prove little.
    assert max(worst.values()) > 0.02


@pytest.mark.deep
@pytest.mark.parametrize("name", KERNELS)
def test_no_honest_kernel_exceeds_its_bound_in_a_long_run(name: str) -> None:
    worst = attacked(KERNELS[name], range(3, 60))
    assert {place: ratio for place, ratio in worst.items() if not ratio <= 1} == {}


BROKEN: dict[str, tuple[Backward, str, int, str]] = {
    # A kernel, a family in which it breaks that form of a stricter contract in bf16, and the output that shows it.
    "P cast under fp32": (Backward({"preset": "fp32"}, cast=True), "ties", 0, "dv"),
    "dS stored under fp32": (Backward({"preset": "fp32"}, stores=1), "ties", 0, "dq"),
    "dP stored under fp32": (
        Backward({"preset": "fp32"}, delta="weights", saved="weights", dp_stored=True), "one-signed", 3, "dk"
    ),
    "eager under flash": (
        Backward({"preset": "flash"}, delta="weights", saved="weights", eager=True, stores=2, dp_stored=True),
        "large logits", 6, "dq",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_exceeds_the_bound(name: str) -> None:
    kernel, inputs, form, output = BROKEN[name]
    kernel, worst, fmt = replace(kernel, form=form), 0.0, FORMATS["bf16"]
    for seed in range(30):
        worst = max(worst, ratios(kernel, fmt, drawn(inputs, fmt, np.random.default_rng(seed)))[output])
        if worst > 1:
            break
    assert worst > 1
