"""Gradients of mla's core: against differences of the definition, and the bound against honest and broken kernels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from meta_tests.kernels.honest_backward import KERNELS, Backward, Gradients, run
from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.ball import BallArithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.bounds.mla.gradient import bounds
from oracle.case import Case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS, Format
from oracle.ops.contracts import declared_forms
from oracle.ops.mla import case as mla_case
from oracle.ops.mla.gradient_case import OUTPUTS

Array = NDArray[Any]
FAMILIES = ("normal", "peaked", "large latents", "tiny cotangent", "outliers", "cancelling", "causal")
USED = {name: kernel for name, kernel in KERNELS.items() if name not in ("flash, rounded sum",)}


def case_of(family: str, fmt: Format, rng: np.random.Generator, *, small: bool = False) -> Case:
    pick = rng.choice
    b, h = (1, 2) if small else (int(pick([1, 2])), int(pick([1, 3])))
    sq, sk = (2, 3) if small else (int(pick([1, 5, 12])), int(pick([1, 7, 20])))
    d_h, d_r, d_c, d_v = (
        (2, 1, 2, 2) if small else (int(pick([2, 8])), int(pick([1, 4])), int(pick([3, 16])), int(pick([2, 8])))
    )
    shapes = {
        "q_nope": (b, h, sq, d_h),
        "q_pe": (b, h, sq, d_r),
        "c_kv": (b, sk, d_c),
        "k_pe": (b, sk, d_r),
        "w_uk": (h, d_h, d_c),
        "w_uv": (h, d_v, d_c),
        "do": (b, h, sq, d_v),
    }
    a = {n: rng.standard_normal(s) / (np.sqrt(s[-1]) if n.startswith("w") else 1) for n, s in shapes.items()}
    options: dict[str, Any] = {}
    match family:
        case "peaked":
            a["q_nope"], a["q_pe"] = a["q_nope"] * 6, a["q_pe"] * 6
        case "large latents":
            a["c_kv"], options["scale"] = a["c_kv"] * 30, 0.01
        case "tiny cotangent":
            a["do"] = a["do"] * fmt.smallest_normal * 8
        case "outliers":
            a["c_kv"] = a["c_kv"] * np.where(rng.random(a["c_kv"].shape) < 0.1, 20, 1)
        case "cancelling":
            a["w_uk"][..., 1::2] = -a["w_uk"][..., 0::2][..., : a["w_uk"][..., 1::2].shape[-1]]
            a["c_kv"][..., 1::2] = a["c_kv"][..., 0::2][..., : a["c_kv"][..., 1::2].shape[-1]] * (1 + 2.0**-8)
        case "causal":
            options["is_causal"] = True
    return Case("mla_backward", {n: fmt.store(x) for n, x in a.items()}, options)


ORDERS = ("materialised", "absorbed", "absorbed, D from O")


class Honest:
    """A kernel of mla's gradients around `honest_backward`, every sum in turn.

    order: what is built, k and v of every head or q~ and the latent sum. stored: that is kept in the input format, and
    so are the gradients of it.
    """

    def __init__(self, kernel: Backward, fmt: Format, *, order: str, stored: bool) -> None:
        self.kernel, self.fmt, self.order, self.stored = kernel, fmt, order, stored
        self.real: Any = np.float64 if fmt.name == "fp64" else np.float32

    def store(self, x: Array) -> Array:
        return x.astype(self.fmt.dtype).astype(self.real) if self.stored and self.fmt.precision < 24 else x

    def dot(self, x: Array, y: Array) -> Array:
        total = np.zeros((len(x), y.shape[1]), self.real)
        x, y = self.kernel.operand(x), self.kernel.operand(y)
        for i in range(x.shape[1]):
            total = self.kernel.flushed(total + self.kernel.flushed(x[:, i : i + 1] * y[i]))
        return total

    def __call__(self, case: Case) -> dict[str, Array]:
        a = {n: x.astype(self.real) for n, x in case.arrays.items()}
        found = {f"d{n}": np.zeros(a[n].shape, self.real) for n in a if n != "do"}
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(a["q_nope"].shape[:2]):
                head = {n: a[n][b, h] for n in ("q_nope", "q_pe", "do")} | {n: a[n][b] for n in ("c_kv", "k_pe")}
                head |= {n: a[n][h] for n in ("w_uk", "w_uv")}
                made = (self.materialised if self.order == "materialised" else self.absorbed)(case, head)
                found["dq_nope"][b, h], found["dq_pe"][b, h] = made["dq_nope"], made["dq_pe"]
                for name, place in (("dc_kv", b), ("dk_pe", b), ("dw_uk", h), ("dw_uv", h)):
                    found[name][place] += made[name]
            return {n: self.fmt.round(x.astype(np.float64)) for n, x in found.items()}

    def attend(self, case: Case, q: Array, k: Array, v: Array, do: Array, **more: Any) -> Gradients:
        visible = mla_case.visibility(case, np.arange(len(q)))
        return run(self.kernel, self.fmt, q, k, v, do, alpha=mla_case.scale_float(case), visible=visible, **more)

    def materialised(self, case: Case, a: dict[str, Array]) -> dict[str, Array]:
        c, d_h = a["c_kv"], a["w_uk"].shape[0]
        k, v = np.hstack([self.store(self.dot(c, a["w_uk"].T)), a["k_pe"]]), self.store(self.dot(c, a["w_uv"].T))
        made = self.attend(case, np.hstack([a["q_nope"], a["q_pe"]]), k, v, a["do"])
        dk, dv = self.store(made.dk), self.store(made.dv)
        return {
            "dq_nope": made.dq[:, :d_h],
            "dq_pe": made.dq[:, d_h:],
            "dc_kv": self.dot(dk[:, :d_h], a["w_uk"]) + self.dot(dv, a["w_uv"]),
            "dk_pe": dk[:, d_h:],
            "dw_uk": self.dot(np.ascontiguousarray(dk[:, :d_h].T), c),
            "dw_uv": self.dot(np.ascontiguousarray(dv.T), c),
        }

    def absorbed(self, case: Case, a: dict[str, Array]) -> dict[str, Array]:
        c, d_c = a["c_kv"], a["c_kv"].shape[1]
        q = np.hstack([self.store(self.dot(a["q_nope"], a["w_uk"])), a["q_pe"]])
        dz = self.store(self.dot(a["do"], a["w_uv"]))

        def delta_of(z: Array) -> Array:
            out = self.dot(z, a["w_uv"].T).astype(self.fmt.dtype).astype(self.real)
            return (a["do"] * out).sum(axis=1, keepdims=True, dtype=self.real)

        more = {"delta_of": delta_of} if self.order.endswith("O") else {}
        made = self.attend(case, q, np.hstack([c, a["k_pe"]]), c, dz, out_stored=self.stored, **more)
        dq = np.hstack([self.store(made.dq[:, :d_c]), made.dq[:, d_c:]])
        return {
            "dq_nope": self.dot(dq[:, :d_c], a["w_uk"].T),
            "dq_pe": made.dq[:, d_c:],
            "dc_kv": self.store(made.dk[:, :d_c]) + self.store(made.dv),
            "dk_pe": made.dk[:, d_c:],
            "dw_uk": self.dot(np.ascontiguousarray(a["q_nope"].T), dq[:, :d_c]),
            "dw_uv": self.dot(np.ascontiguousarray(a["do"].T), made.out),
        }


def sharp(case: Case) -> list[Block]:
    return [refine(case, block, np.ones(len(block.rows), dtype=bool), 160) for block in enclose(case)]


@cache
def drawn(family: str, dtype: str, seed: int) -> tuple[Case, list[Block]]:
    """What every kernel of a dtype is attacked with."""
    case = case_of(family, FORMATS[dtype], np.random.default_rng([seed, FAMILIES.index(family)]))
    return case, sharp(case)


def ratios(
    kernel: Backward,
    fmt: Format,
    case: Case,
    blocks: Iterable[Block],
    contract: dict[str, Any] | None = None,
    *,
    stored: bool = True,
    form: int = -1,
    order: str = "materialised",
) -> dict[str, float]:
    forms = declared_forms("mla_backward", contract or kernel.contract, fmt.name)
    chosen = [f for f in forms if f.latent.form == order.partition(",")[0]][kernel.form if form < 0 else form]
    got = Honest(kernel, fmt, order=order, stored=stored)(case)
    worst = dict.fromkeys(OUTPUTS, 0.0)
    formats = dict.fromkeys(OUTPUTS, fmt)
    for block in blocks:
        promise = bounds(case, block, (chosen,), formats)[0]
        for name, bound in promise.items():
            y, part = block.take(name, got[name]), block.part(name)
            with np.errstate(all="ignore"):
                certain = np.maximum(part.distance(y) - part.rad, 0.0)
                found = np.where(certain > 0, certain / bound.bound, 0.0)
            found = np.where(np.isfinite(y), found, np.inf)
            found = np.where(bound.may_overflow & ~np.isfinite(y), 0.0, found)
            worst[name] = max(worst[name], float(found.max()))
    return worst


def worst_of(name: str, seeds: range, order: str) -> dict[str, float]:
    kernel, most = USED[name], dict.fromkeys(OUTPUTS, 0.0)
    for dtype in kernel.formats:
        fmt = FORMATS[dtype]
        for family in FAMILIES:
            for seed in seeds:
                # A contract that keeps everything in float32 is kept by a kernel that stores nothing.
                stored = kernel.contract["preset"] not in ("fp32", "fp64", "tf32")
                found = ratios(kernel, fmt, *drawn(family, dtype, seed), stored=stored, order=order)
                most = {n: max(most[n], found[n]) for n in most}
    return most


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", USED)
def test_no_honest_kernel_exceeds_its_bound(name: str, order: str) -> None:
    most = worst_of(name, range(1), order)
    assert max(most.values()) <= 1, most
    assert min(most.values()) > 1e-3, most
    assert max(most.values()) > 0.05, most


@pytest.mark.deep
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", USED)
def test_no_honest_kernel_exceeds_its_bound_at_length(name: str, order: str) -> None:
    most = worst_of(name, range(1, 16), order)
    assert max(most.values()) <= 1, most


@pytest.mark.parametrize("order", ORDERS)
def test_broken_promises_exceed_it(order: str) -> None:
    fmt = FORMATS["bf16"]
    cases = [case_of("peaked", fmt, np.random.default_rng(seed)) for seed in range(6)]
    exact = [(case, sharp(case)) for case in cases]

    def worst(kernel: str, contract: dict[str, Any], **more: Any) -> dict[str, float]:
        found = [ratios(USED[kernel], fmt, *pair, contract, form=0, order=order, **more) for pair in exact]
        return {n: max(ratio[n] for ratio in found) for n in OUTPUTS}

    # P, dS, and k and v or q~, z and dz stored, all of which are said to stay in float32.
    assert sum(ratio > 1 for ratio in worst("flash", {"preset": "fp32"}).values()) >= 5
    assert max(worst("fp32", {"preset": "fp32"}, stored=True).values()) > 1
    assert max(worst("fp32", {"preset": "fp32"}, stored=False).values()) <= 1


def overflows() -> dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str]]:
    """Order, D, arrays, options, and what is not finite, where something on the way exceeds fp16, and that not."""
    rng = np.random.default_rng(0)

    def a(*shape: int, size: float = 1.0) -> Array:
        return rng.standard_normal(shape) * size

    def case(**sizes: float) -> dict[str, Array]:
        shapes = {"q_nope": (1, 1, 3, 3), "q_pe": (1, 1, 3, 2), "c_kv": (1, 3, 4), "k_pe": (1, 3, 2)}
        shapes |= {"w_uk": (1, 3, 4), "w_uv": (1, 2, 4), "do": (1, 1, 3, 2)}
        return {n: a(*s, size=sizes.get(n, 1.0)) for n, s in shapes.items()}

    output = case(q_nope=0.01, w_uk=0.01, do=1e-3) | {"w_uv": np.full((1, 2, 4), 100.0)}
    output["c_kv"] = 200 + 20 * rng.random((1, 3, 4))
    hidden = case(q_nope=1e-5) | {"w_uk": np.full((1, 3, 4), 100.0)}
    hidden["c_kv"][0, 2] = 300
    return {
        "O": ("absorbed, D from O", "output", output, {}, "dq_nope"),
        "dk": ("materialised", "output",
               case(q_nope=300, q_pe=0.01, k_pe=0.01, c_kv=1e-3, w_uk=1e-3, w_uv=2000, do=1000), {}, "dw_uk"),
        "dq~": ("absorbed", "weights", case(q_nope=0.01, q_pe=0.01, c_kv=200, k_pe=0.01, w_uk=1e-3, w_uv=0.1, do=100),
                {}, "dw_uk"),
        "k of a hidden key": ("materialised", "output", hidden, {"is_causal": True}, "dq_nope"),
    }  # fmt: skip


@pytest.mark.parametrize("what", overflows())
def test_what_may_overflow_on_the_way_is_promised_to_nobody(what: str) -> None:
    order, delta, arrays, options, shown = overflows()[what]
    fmt = FORMATS["fp16"]
    case = Case("mla_backward", {n: fmt.store(x) for n, x in arrays.items()}, options)
    kernel = USED["flash" if delta == "output" else "flash, D from weights"]
    found = Honest(kernel, fmt, order=order, stored=True)(case)
    assert not np.isfinite(found[shown]).all()
    forms = declared_forms("mla_backward", {"preset": "flash", "form": order.partition(",")[0]}, "fp16")
    form = next(f for f in forms if f.gradient.delta == delta)
    for block in enclose(case):
        for name, bounded in bounds(case, block, (form,), dict.fromkeys(OUTPUTS, fmt))[0].items():
            y = block.take(name, found[name])
            assert (np.isfinite(y) | bounded.may_overflow | ~np.isfinite(bounded.bound)).all(), name


# --- the enclosures ---------------------------------------------------------------------------------------------------


def loss(case: Case, a: dict[str, Any]) -> Any:
    """sum dO o O by loops from the definition of the forward pass, in mpf."""
    batch, heads, rows, d_h = np.shape(case.arrays["q_nope"])
    d_r, keys = case.arrays["q_pe"].shape[3], case.arrays["c_kv"].shape[1]
    scale = case.options.get("scale")
    alpha = 1 / mpmath.sqrt(d_h + d_r) if scale is None else mpmath.mpf(scale)
    shift = keys - rows if case.options.get("causal_alignment") == "bottom_right" else 0
    total = mpmath.mpf(0)
    for b in range(batch):
        for h in range(heads):
            latents = [list(a["c_kv"][b][j]) for j in range(keys)]
            key = [[mpmath.fsum(w * c for w, c in zip(row, x, strict=True)) for row in a["w_uk"][h]] for x in latents]
            value = [[mpmath.fsum(w * c for w, c in zip(row, x, strict=True)) for row in a["w_uv"][h]] for x in latents]
            for i in range(rows):
                weights = []
                for j in range(keys):
                    if case.options.get("is_causal") and j > i + shift:
                        continue
                    nope = mpmath.fsum(p * q for p, q in zip(a["q_nope"][b][h][i], key[j], strict=True))
                    rope = mpmath.fsum(p * q for p, q in zip(a["q_pe"][b][h][i], a["k_pe"][b][j], strict=True))
                    weights.append((mpmath.exp(alpha * (nope + rope)), value[j]))
                norm = mpmath.fsum(w for w, _ in weights)
                for c, g in enumerate(a["do"][b][h][i]):
                    total += g * mpmath.fsum(w * v[c] for w, v in weights) / norm
    return total


@pytest.mark.parametrize("family", ["normal", "causal", "large latents"])
def test_enclosures_hold_differences_of_the_definition_and_each_other(family: str) -> None:
    case = case_of(family, FORMATS["bf16"], np.random.default_rng(1), small=True)
    by_arithmetic = [enclose(case, ar=ar) for ar in (BallArithmetic(), arb_arithmetic(160), mp_arithmetic(300))]
    with mpmath.workprec(400):
        step = mpmath.mpf(2) ** -120

        def exact(x: Any) -> Any:
            return mpmath.mpf(float(x)) if np.ndim(x) == 0 else [exact(row) for row in x]

        slopes: dict[str, Array] = {}
        for name in OUTPUTS:
            source = name[1:]
            slopes[name] = np.empty(case.arrays[source].shape, dtype=object)
            for place in np.ndindex(case.arrays[source].shape):
                ends = []
                for sign in (1, -1):
                    a = {n: exact(x.astype(np.float64)) for n, x in case.arrays.items()}
                    row = a[source]
                    for index in place[:-1]:
                        row = row[index]
                    row[place[-1]] += sign * step
                    ends.append(loss(case, a))
                slopes[name][place] = (ends[0] - ends[1]) / (2 * step)
        for blocks in by_arithmetic:
            for block in blocks:
                for name in OUTPUTS:
                    if not block.holds(name):
                        continue
                    part, value = block.part(name), block.take(name, slopes[name])
                    for at in np.ndindex(value.shape):
                        middle = mpmath.mpf(float(part.hi[at])) + mpmath.mpf(float(part.lo[at]))
                        assert abs(middle - value[at]) <= part.rad[at] + (1 + abs(value[at])) * mpmath.mpf(2) ** -95
    for ball, fine in zip(by_arithmetic[0], by_arithmetic[1], strict=True):
        for name in OUTPUTS:
            if ball.holds(name):
                a, b = ball.part(name), fine.part(name)
                assert (np.abs((a.hi - b.hi) + (a.lo - b.lo)) <= a.rad + b.rad).all()


def test_some_rows_alone_are_those_of_the_whole() -> None:
    case = case_of("normal", FORMATS["fp16"], np.random.default_rng(2))
    for block in enclose(case):
        rows = np.array([0, len(block.rows) - 1])
        some = enclose(case, rows=rows, blocks=[block.key])[0]
        for name in OUTPUTS:
            if block.holds(name):
                a, b = block.part(name), some.part(name)
                assert (np.abs(a.hi[rows] - b.hi) <= a.rad[rows] + b.rad).all()


def test_a_nan_spoils_what_reads_it() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(0))
    do = case.arrays["do"].copy()
    do[0, 0, 0, 0] = np.nan
    for block in enclose(case.with_arrays(do=do)):
        first = block.key[0] == 0 and block.key[1:] == (0, 0)
        if block.key[0] == 0:
            assert block.undefined.tolist() == [first and i == 0 for i in range(len(block.rows))]
        else:
            assert block.undefined.all() == (block.key[1] == 0)


def test_wrong_cases_are_named() -> None:
    case = case_of("normal", FORMATS["fp32"], np.random.default_rng(0))
    with pytest.raises(ValueError, match="do must be"):
        enclose(case.with_arrays(do=case.arrays["do"][..., :1]))
    with pytest.raises(ValueError, match="w_uk has"):
        enclose(case.with_arrays(w_uk=case.arrays["w_uk"][..., :1]))
