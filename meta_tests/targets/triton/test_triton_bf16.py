"""The repaired bfloat16 arithmetic of Triton's interpreter, operation by operation, and that it is needed."""

from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from targets.builtin.triton import interpreter as triton_interpreter
from targets.builtin.triton.flash import attention
from targets.builtin.triton.interpreter import (
    fused_multiply_add,
    launch,
    narrow,
    widen,
)

SIZE = 1024


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "min":
        r = tl.minimum(x, y)
    elif OP == "max":
        r = tl.maximum(x, y)
    elif OP == "clamp":
        r = tl.clamp(x, tl.minimum(y, y + y), tl.maximum(y, y + y), propagate_nan=tl.PropagateNan.ALL)
    elif OP == "fma":
        r = tl.fma(x, y, x)
    elif OP == "where":
        r = tl.where(x < y, x, y)
    elif OP == "constant":
        r = tl.full((SIZE,), 1.1, tl.bfloat16)
    elif OP == "less":
        r = (x < y).to(tl.bfloat16)
    elif OP == "equal":
        r = (x == y).to(tl.bfloat16)
    tl.store(out_ptr + at, r)


@triton.jit
def row_kernel(x_ptr, out_ptr, OP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[:, None] * COLS + tl.arange(0, COLS)[None, :])
    if OP == "sum":
        tl.store(out_ptr + row, tl.reduce(x, 1, tl.standard._sum_combine))
    elif OP == "max":
        tl.store(out_ptr + row, tl.reduce(x, 1, tl.standard._elementwise_max))
    elif OP == "min":
        tl.store(out_ptr + row, tl.reduce(x, 1, tl.standard._elementwise_min))
    elif OP == "cumsum":
        r = tl.associative_scan(x, 1, tl.standard._sum_combine)
        tl.store(out_ptr + row[:, None] * COLS + tl.arange(0, COLS)[None, :], r)
    elif OP == "cumprod":
        r = tl.associative_scan(x, 1, tl.standard._prod_combine)
        tl.store(out_ptr + row[:, None] * COLS + tl.arange(0, COLS)[None, :], r)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


def patterns(seed: int, *, finite: bool = False) -> torch.Tensor:
    """bfloat16 values of every kind: numbers near 1, where roundings differ, subnormals, specials, any."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, SIZE, dtype=np.uint16)
    bits[: SIZE // 2] = (rng.integers(120, 134, SIZE // 2) << 7 | rng.integers(0, 128, SIZE // 2)).astype(np.uint16)
    bits[: SIZE // 2] |= (rng.integers(0, 2, SIZE // 2) << 15).astype(np.uint16)
    bits[SIZE // 2 : SIZE // 2 + 64] &= 0x80FF
    if finite:
        bits[(bits & 0x7F80) == 0x7F80] = 0x3F80
    else:
        bits[-8:] = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0x0001, 0x8001]
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Patterns as integers, every NaN the same."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int16).numpy()


def nearest(exact: Fraction) -> float:
    """The bfloat16 nearest to an exact number, ties to even: by definition, from its two neighbours."""
    guess = widen(narrow(np.array([float(exact)], np.float32)))[0]
    around = [float(widen(np.array([int(bits)], np.uint16))[0]) for bits in _adjacent(guess)]
    return min(around, key=lambda value: (abs(Fraction(value) - exact), int(narrow(np.float32([value]))[0]) & 1))


def _fused(x: float, y: float) -> float:
    exact = Fraction(x) * Fraction(y) + Fraction(x)  # torch has no fused operation, and rounds float64 twice
    return nearest(exact) if abs(exact) < Fraction(3e38) else float("inf") * (1 if exact > 0 else -1)


def _adjacent(value: np.float32) -> list[int]:
    bits = int(narrow(np.array([value]))[0])
    magnitude, sign = bits & 0x7FFF, bits & 0x8000
    return [sign | step for step in (magnitude - 1, magnitude, magnitude + 1) if 0 <= step < 0x7F80]


EXPECTED = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "min": torch.fmin,
    "max": torch.fmax,
    "clamp": lambda x, y: torch.minimum(torch.maximum(x, torch.minimum(y, y + y)), torch.maximum(y, y + y)),
    "constant": lambda x, y: torch.full_like(x, 1.1),
    "less": lambda x, y: (x < y).bfloat16(),
    "equal": lambda x, y: (x == y).bfloat16(),
    "where": lambda x, y: torch.where(x < y, x, y),
    "fma": lambda x, y: torch.tensor([_fused(*row) for row in zip(x.tolist(), y.tolist(), strict=True)]).bfloat16(),
}


ROW_EXPECTED = {
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
}


def run_binary(op: str) -> tuple[np.ndarray, np.ndarray]:
    # What the extremes of a NaN are depends on the version of Triton.
    finite = op in ("min", "max", "clamp", "fma")
    x, y = patterns(1, finite=finite), patterns(2, finite=finite)
    if op == "neg":
        x = torch.where(x == 0, 1, x)  # before 3.8, -x is 0 - x, which makes 0 of 0
    out = torch.empty_like(x)
    launch(binary_kernel, (1,), {"x_ptr": x, "y_ptr": y, "out_ptr": out, "OP": op, "SIZE": SIZE})
    return bits_of(out), bits_of(EXPECTED[op](x, y))


def run_rows(op: str) -> tuple[np.ndarray, np.ndarray]:
    # Integers with few bits: sums are exact in float32, so no order of summation matters, and round once.
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-127, 128, (16, 64), generator=generator).bfloat16()
    if op == "cumprod":
        x = 1 + x.remainder(3) / 128
    expected = ROW_EXPECTED[op](x)
    out = torch.empty_like(expected)
    launch(row_kernel, (1,), {"x_ptr": x, "out_ptr": out, "OP": op, "ROWS": 16, "COLS": 64})
    return bits_of(out), bits_of(expected)


def run_dot() -> tuple[np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-8, 9, (32, 32), generator=generator).bfloat16() / 4 for _ in range(2))
    out = torch.empty(32, 32)
    launch(dot_kernel, (1,), {"a_ptr": a, "b_ptr": b, "out_ptr": out, "N": 32})
    # Small multiples of 1/16: exact in any order.
    return out.numpy(), (a.double() @ b.double()).float().numpy()


CASTS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
    "bool": torch.bool,
}


def run_cast(name: str, *, to_bf16: bool) -> tuple[np.ndarray, np.ndarray]:
    other = CASTS[name]
    if to_bf16:
        generator = torch.Generator().manual_seed(5)
        x = (torch.randn(SIZE, generator=generator, dtype=torch.float64) * 1000).to(other)
    else:
        x = patterns(6, finite=True)
        x = torch.where(x.abs() < 1e9, x, 1.5) if not other.is_floating_point else x
    expected = x.to(torch.bfloat16 if to_bf16 else other)
    out = torch.empty_like(expected)
    launch(cast_kernel, (1,), {"x_ptr": x, "out_ptr": out, "SIZE": SIZE})
    return out.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy()


RUNS = {
    **{f"binary {op}": (run_binary, (op,), {}) for op in EXPECTED},
    **{f"rows {op}": (run_rows, (op,), {}) for op in ROW_EXPECTED},
    "dot": (run_dot, (), {}),
    **{f"{name} to bf16": (run_cast, (name,), {"to_bf16": True}) for name in CASTS},
    **{f"bf16 to {name}": (run_cast, (name,), {"to_bf16": False}) for name in CASTS},
}


@pytest.mark.parametrize("name", RUNS)
def test_repaired_operation_equals_torch(name: str) -> None:
    function, args, options = RUNS[name]
    got, expected = function(*args, **options)
    np.testing.assert_array_equal(got, expected)


# These three pass through float32, where the interpreter loses subnormals only, and those become 0 anyway.
HARMLESS = ("bf16 to fp16", "bf16 to int32", "bf16 to bool")


@pytest.mark.parametrize("name", [name for name in RUNS if name not in HARMLESS])
def test_unrepaired_operation_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter, "repaired_bf16", nullcontext)
    function, args, options = RUNS[name]
    try:
        got, expected = function(*args, **options)
    except triton.InterpreterError as error:  # before 3.9 a constant is missing, not wrong
        assert name == "binary constant" and "get_bf16" in str(error)
    else:
        assert (got != expected).any()


def test_unrepaired_attention_is_silently_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 1, 16, 16, generator=generator).bfloat16() for _ in range(3))
    right = attention(q, k, v)
    monkeypatch.setattr(triton_interpreter, "repaired_bf16", nullcontext)
    wrong = attention(q, k, v)
    assert (right - wrong).abs().max() > 0.1 or wrong.isnan().any()


def test_widen_and_narrow_agree_with_torch_on_every_pattern() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)
    exact = torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widen(upper.astype(np.uint16)), exact)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # exact, and around the tie, and nearly the next
        single = ((upper << 16) | lower).view(np.float32)
        expected = torch.from_numpy(single).bfloat16()
        number = ~np.isnan(single)
        np.testing.assert_array_equal(
            narrow(single)[number], expected.view(torch.int16).numpy().view(np.uint16)[number]
        )
        assert np.isnan(widen(narrow(single)[~number])).all()


def test_float64_is_rounded_once() -> None:
    """Just beside a tie, float32 on the way would see the tie itself; torch does that, a GPU does not."""
    for sign in (1.0, -1.0):
        for scale in (1.0, 2.0**-130, 2.0**-134, 2.0**100):
            tie = (1 + 2**-8) * scale if scale > 2**-126 else scale
            above, below = sign * tie * (1 + 2**-40), sign * tie * (1 - 2**-40)
            for value in (above, below):
                assert float(widen(narrow(np.array([value])))[0]) == nearest(Fraction(value))
    assert float(torch.tensor((1 + 2**-8) * (1 + 2**-40), dtype=torch.float64).bfloat16()) == 1.0  # not that


def test_one_operation_in_float32_is_one_rounding() -> None:
    """Figueroa's theorem, and that subnormals are no exception: against exact rational arithmetic."""
    rng = np.random.default_rng(8)
    near_one = rng.integers(0x3F00, 0x4100, 300)
    tiny = rng.integers(0x0001, 0x0180, 300)
    products = rng.integers(0x1F00, 0x2080, 300)  # squares around the smallest numbers
    for left, right in (
        (near_one, near_one[::-1]),
        (tiny, near_one),
        (products, products[::-1]),
        (tiny, tiny[::-1]),
    ):
        a, b = (widen(side.astype(np.uint16)) for side in (left, right))
        for op in (np.add, np.subtract, np.multiply, np.divide):
            with np.errstate(all="ignore"):
                got = widen(narrow(op(a, b)))
            for x, y, value in zip(a, b, got, strict=True):
                p, r = Fraction(float(x)), Fraction(float(y))
                exact = {"add": p + r, "subtract": p - r, "multiply": p * r, "divide": p / r}[op.__name__]
                if abs(exact) < Fraction(3e38):
                    assert float(value) == nearest(exact)


def test_fused_multiply_add_rounds_once() -> None:
    """x * y sits on a tie of bfloat16 and z, far below float64's last bit, decides it."""
    x = np.array([1 + 2**-7, 1 + 2**-7, -(1 + 2**-7), 3.0], np.float32)
    y = np.array([1.5, 1.5, 1.5, 2.0], np.float32)
    z = np.array([2.0**-100, -(2.0**-100), 2.0**-100, -6.0], np.float32)
    got = widen(fused_multiply_add(*(narrow(side) for side in (x, y, z))))
    exact = [Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)) for p, q, r in zip(x, y, z, strict=True)]
    assert [float(value) for value in got] == [nearest(value) for value in exact]
    assert got[0] != got[1]  # the third operand was seen
    rng = np.random.default_rng(9)
    bits = [rng.integers(0x3000, 0x4F00, 500).astype(np.uint16) for _ in range(3)]
    got = widen(fused_multiply_add(*bits))
    for p, q, r, value in zip(*(widen(side) for side in bits), got, strict=True):
        assert float(value) == nearest(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)))


def test_dot_with_inexact_sums_stays_within_float32() -> None:
    generator = torch.Generator().manual_seed(10)
    a, b = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(64, 64)
    launch(dot_kernel, (1,), {"a_ptr": a, "b_ptr": b, "out_ptr": out, "N": 64})
    bound = 65 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((out.double() - a.double() @ b.double()).abs() <= bound).all()
