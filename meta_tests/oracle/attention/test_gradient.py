"""Gradients of attention: the formula against second witnesses, enclosures, refusals."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
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
