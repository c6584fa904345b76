"""`rounded`: products are summed in one pass as one after another, and float32 is rounded as formats say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oracle.arithmetic import rounded
from oracle.arithmetic.rounded import RoundedArithmetic
from oracle.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, TF32


def one_by_one(a, b):
    """a @ b as its definition: one product and one rounded sum after another."""
    total = np.zeros((len(a), b.shape[1]), dtype=a.dtype)
    for k in range(a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


SHAPES = [(1, 1, 1), (1, 9, 1), (1, 300, 1), (1, 70, 5), (5, 70, 1), (2, 0, 3), (1, 0, 1), (3, 37, 16), (64, 40, 9)]
SHAPES += [(9, 40, 64), (4, 33, 2500), (2500, 33, 4), (1, 200, 3000), (16, 1, 16), (2, 500, 2), (7, 8, 7)]


@pytest.mark.parametrize("fused", [False, True], ids=["as this numpy does it", "where einsum fuses"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_products_are_summed_from_the_first_to_the_last(n, k, m, dtype, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(rounded, "_fused", lambda dtype: True)
    rng = np.random.default_rng(n + 10 * k + 100 * m)
    a, b = (np.asarray(rng.standard_normal(s) * 10.0 ** rng.integers(-3, 4, s), dtype) for s in ((n, k), (k, m)))
    ar = RoundedArithmetic(FP32 if dtype is np.float32 else FP64)
    assert np.array_equal(ar.matmul(a, b, "s"), one_by_one(a, b))
    assert np.array_equal(ar.matmul(np.asfortranarray(a), b[:, ::-1], "s"), one_by_one(a, b[:, ::-1]))
    if k > 100:
        # Another order would be seen.
        assert not np.array_equal(one_by_one(a[:, ::-1], b[::-1]), one_by_one(a, b))


def test_a_fused_product_is_seen_where_it_would_matter():
    rng = np.random.default_rng(3)
    exact = [BF16.round(rng.standard_normal((4, 50))).astype(np.float32) for _ in range(2)]
    assert rounded._products_are_exact(*exact)
    assert not rounded._products_are_exact(exact[0], rng.standard_normal((50, 4)).astype(np.float32))
    assert not rounded._products_are_exact(exact[0], exact[1] * np.float32(2.0**-120))
    assert rounded._products_are_exact(*(FP16.round(x).astype(np.float32) for x in exact))


@pytest.mark.parametrize(
    "fmt", [BF16, FP16, TF32, E4M3, E5M2, replace(E4M3, emin=-14, emax=0), replace(BF16, emin=-125, emax=128)]
)
def test_float32_is_rounded_as_formats_say(fmt):
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    some = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-30, 12, 50_000)).astype(np.float32)
    ties = np.concatenate([np.ldexp(1.0, rng.integers(-20, 10, 5000)) * (1 + rng.integers(0, 2**12, 5000) * 2.0**-12)])
    ar = RoundedArithmetic(FP32, {"s": fmt})
    for x in (bits.view(np.float32), some, ties.astype(np.float32), np.array([0.0, -0.0, np.inf, -np.inf, np.nan])):
        x = x.astype(np.float32)[None, :]
        with np.errstate(all="ignore"):
            want, got = fmt.round(x).astype(np.float32), ar.round(x, "s")
        assert got.dtype == np.float32
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got), np.signbit(want) & ~np.isnan(want) | np.signbit(got) & np.isnan(want))
