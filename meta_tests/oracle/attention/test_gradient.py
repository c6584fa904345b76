"""Gradients of attention: the formula against second witnesses, enclosures, bounds against honest kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from meta_tests.kernels.honest_backward import KERNELS, Backward, run
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.bounds.attention.gradient import bounds
from oracle.case import Case
from oracle.contract.presets import declared_forms
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Float64Array, Format
from oracle.ops.attention import case as attention_case
from oracle.ops.attention import gradient_case as gradients

DIGITS = 40


def case_of(rng: np.random.Generator, shape: tuple[int, ...], *, dtype: str = "fp64", **options: Any) -> Case:
    """shape: B, Hq, Hkv, Sq, Sk, D, Dv."""
    b, hq, hkv, sq, sk, d, dv = shape
    fmt = FORMATS[dtype]
    shapes = {"q": (b, hq, sq, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv), "do": (b, hq, sq, dv)}
    return Case("attention_backward", {n: fmt.store(rng.standard_normal(s)) for n, s in shapes.items()}, options)


def option_cases() -> dict[str, Case]:
    rng = np.random.default_rng(5)
    shape = (1, 2, 1, 3, 4, 2, 2)
    mask = rng.random((1, 1, 3, 4)) < 0.6
    mask[..., 0] = True
    empty = mask.copy()
    empty[..., 1, :] = False
    return {
        "plain": case_of(rng, shape),
        "two sequences, groups": case_of(rng, (2, 4, 2, 2, 3, 2, 1)),
        "causal": case_of(rng, shape, is_causal=True, causal_alignment="bottom_right"),
        "window": case_of(rng, shape, window_size=(1, 0), causal_alignment="bottom_right"),
        "boolean mask": case_of(rng, shape, attn_mask=mask),
        "empty row": case_of(rng, shape, attn_mask=empty),
        "bias": case_of(rng, shape, attn_mask=rng.standard_normal((1, 2, 3, 4))),
        "bias [Sq, Sk]": case_of(rng, shape, attn_mask=rng.standard_normal((3, 4))),
        "bias over keys": case_of(rng, (2, 2, 1, 3, 4, 2, 2), attn_mask=rng.standard_normal((2, 1, 1, 4))),
        "bias a row": case_of(rng, shape, attn_mask=rng.standard_normal((1, 1, 3, 1))),
        "scale": case_of(rng, shape, scale=-1.7),
        "softcap": case_of(rng, shape, softcap=0.8),
        "softcap after the bias": case_of(
            rng, shape, softcap=0.8, softcap_order="after_mask", attn_mask=rng.standard_normal((1, 1, 3, 4))
        ),
        "alibi": case_of(rng, shape, alibi_slopes=rng.random(2)),
        "sinks": case_of(rng, shape, sinks=rng.standard_normal(2)),
        "everything": case_of(
            rng,
            shape,
            window_size=(2, 1),
            softcap=1.5,
            alibi_slopes=rng.random(2),
            sinks=rng.standard_normal(2),
            attn_mask=rng.standard_normal((1, 1, 3, 4)),
        ),
    }


CASES = option_cases()


# ---- a witness that knows no gradient: the loss dO . O in mpmath, differentiated numerically


def loss(case: Case, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """sum dO o O by loops from the definition of the forward pass; arrays and options of mpf."""
    q, k, v, do = (arrays[n] for n in ("q", "k", "v", "do"))
    batch, heads, rows, dim = np.shape(case.arrays["q"])
    shared, keys = case.arrays["k"].shape[1:3]
    alpha = mpmath.mpf(1) / mpmath.sqrt(dim) if options.get("scale") is None else mpmath.mpf(options["scale"])
    shift = keys - rows if options.get("causal_alignment") == "bottom_right" else 0
    mask, cap = options.get("attn_mask"), options.get("softcap")
    total = mpmath.mpf(0)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // shared)
            for i in range(rows):
                scores = {}
                for j in range(keys):
                    if options.get("is_causal") and j > i + shift:
                        continue
                    left, right = options.get("window_size") or (-1, -1)
                    if (left >= 0 and j < i + shift - left) or (right >= 0 and j > i + shift + right):
                        continue
                    bias = mpmath.mpf(0)
                    if mask is not None:
                        held = _broadcast(mask, (batch, heads, rows, keys), (b, h, i, j))
                        if held is True or held is np.True_:
                            pass
                        elif held is False or held is np.False_:
                            continue
                        else:
                            bias += held
                    if options.get("alibi_slopes") is not None:
                        bias -= options["alibi_slopes"][h] * abs(i + shift - j)
                    s = alpha * mpmath.fsum(q[b, h, i, c] * k[b, g, j, c] for c in range(dim))
                    if cap is not None and options.get("softcap_order") == "after_mask":
                        s = cap * mpmath.tanh((s + bias) / cap)
                    elif cap is not None:
                        s = cap * mpmath.tanh(s / cap) + bias
                    else:
                        s += bias
                    scores[j] = mpmath.exp(s)
                weight = mpmath.fsum(scores.values())
                if options.get("sinks") is not None:
                    weight += mpmath.exp(options["sinks"][h])
                for c in range(case.arrays["v"].shape[-1] if scores else 0):
                    out = mpmath.fsum(p * v[b, g, j, c] for j, p in scores.items()) / weight
                    total += do[b, h, i, c] * out
    return total


def _broadcast(mask: Any, shape: tuple[int, ...], place: tuple[int, ...]) -> Any:
    own = place[len(shape) - mask.ndim :]
    return mask[tuple(0 if n == 1 else i for n, i in zip(mask.shape, own, strict=True))]


def exactly(array: Any) -> Any:
    """An object array of mpf, or the array itself where it is boolean."""
    return array if array.dtype == np.bool_ else np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])(array)


def numerical(case: Case) -> dict[str, Any]:
    """Every gradient by a central difference: its error is of the order of the step's square, 10^-24."""
    with mpmath.workdps(DIGITS + 20):
        arrays = {n: exactly(a) for n, a in case.arrays.items()}
        options = {n: exactly(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
        step, result = mpmath.mpf(10) ** -12, {}
        places = {"dq": arrays["q"], "dk": arrays["k"], "dv": arrays["v"]}
        if gradients.bias_of(case) is not None:
            places["dbias"] = options["attn_mask"]
        if "sinks" in options:
            places["dsinks"] = options["sinks"]
        for name, held in places.items():
            found = np.zeros(held.shape, dtype=object)
            for at in np.ndindex(held.shape):
                kept, sides = held[at], []
                for sign in (1, -1):
                    held[at] = kept + sign * step
                    sides.append(loss(case, arrays, options))
                held[at] = kept
                found[at] = (sides[0] - sides[1]) / (2 * step)
            result[name] = found
        return result


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_derivatives_of_the_definition(name: str) -> None:
    case = CASES[name]
    truth = numerical(case)
    covered = set()
    for block in enclose(case, ar=mp_arithmetic(200)):
        for output in block.outputs or ():
            expected = block.take(output, truth[output])
            gap = max((abs(x) for x in (block.values[output] - expected).ravel()), default=0)
            assert gap < mpmath.mpf(10) ** -20, output
            covered.add(output)
    assert covered == set(gradients.output_shapes(case))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", [BallArithmetic(), arb_arithmetic(128)], ids=["ball", "arb"])
def test_enclosures_hold_the_formula(name: str, engine: Any) -> None:
    case = CASES[name]
    exact = enclose(case, ar=mp_arithmetic(300))
    for block, fine in zip(enclose(case, ar=engine), exact, strict=True):
        for output in block.outputs or ():
            part = block.part(output)
            for at in np.ndindex(part.hi.shape):
                if block.empty[at[0]]:
                    continue
                with mpmath.workprec(400):
                    middle = mpmath.mpf(float(part.hi[at])) + mpmath.mpf(float(part.lo[at]))
                    # The reference itself is good to 300 bits of numbers near 1.
                    doubt = mpmath.mpf(2) ** -280
                    gap = abs(mpmath.mpf(fine.values[output][at]) - middle)
                    assert gap <= mpmath.mpf(float(part.rad[at])) + doubt


def test_balls_hold_arb_on_many_random_heads() -> None:
    rng, tried = np.random.default_rng(0), 0
    for index in range(300):
        sq, sk, d, dv = (int(x) for x in rng.integers(1, 9, 4))
        options: dict[str, Any] = [{}, {"is_causal": True}, {"softcap": 2.0}, {"sinks": rng.standard_normal(2) * 5}][
            index % 4
        ]
        case = case_of(rng, (1, 2, 1, sq, sk, d, dv), **options)
        grown = {n: case.arrays[n] * 10.0 ** float(rng.integers(-3, 3)) for n in ("q", "k", "v", "do")}
        case = case.with_arrays(**grown)
        for coarse, fine in zip(enclose(case), enclose(case, ar=arb_arithmetic(200)), strict=True):
            for output in coarse.outputs or ():
                a, b = coarse.part(output), fine.part(output)
                live = ~coarse.empty[:, None] & np.isfinite(a.rad)
                gap = np.abs((b.hi - a.hi) - a.lo + b.lo)
                assert (np.where(live, gap - b.rad - a.rad, -1.0) <= 0).all(), output
                tried += int(live.sum())
    assert tried > 10_000


def test_rows_of_ds_sum_to_zero_with_the_sink() -> None:
    """sum_j dS_ij - p_s D_i = 0, to the last of 300 bits."""
    case = CASES["everything"]
    ar = mp_arithmetic(300)
    made, _, _, _ = gradients.head_gradients(ar, case, (0, 1), np.arange(3))
    rest = ar.mul(made.sink_weight, made.delta)
    assert max(abs(float(x)) for x in ar.sub(ar.row_sum(made.ds, ""), rest).ravel()) < 1e-85


def test_float64_autograd_agrees() -> None:
    torch = pytest.importorskip("torch")
    case = CASES["two sequences, groups"]
    given = {n: torch.tensor(a, requires_grad=n != "do") for n, a in case.arrays.items()}

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return torch.softmax(q @ k.mT / 2**0.5, -1) @ v

    leaves = [given[n] for n in "qkv"]
    assert torch.autograd.gradcheck(attend, leaves)
    found = torch.autograd.grad(attend(*leaves), leaves, given["do"])
    for block in enclose(case):
        for output in block.outputs or ():
            seen = block.take(output, found["qkv".index(output[1])].numpy())
            assert np.abs(seen - block.part(output).hi).max() < 1e-14


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"do": (1, 2, 3, 5)}, {}, r"do must be \[B, Hq, Sq, Dv\]"),
        ({"q": (1, 2, 3)}, {}, r"q must be"),
        ({}, {"sinks": np.zeros(3)}, "sinks must be"),
        ({}, {"window": (1, 1)}, "unknown option 'window'"),
    ],
)
def test_wrong_cases_are_refused(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    base = CASES["plain"]
    wrong = Case(base.op, {**base.arrays, **{n: np.zeros(s) for n, s in changes.items()}}, options)
    with pytest.raises(ValueError, match=message):
        enclose(wrong)


# ---- bounds against honest kernels


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


# ---- what must exceed: a bound that nothing exceeds proves nothing


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
