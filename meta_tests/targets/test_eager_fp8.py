"""Attention of 8-bit inputs: the built-in target, the honest variants and the mutants against plain float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from meta_tests.targets.test_honest_variants import load
from targets.builtin.eager_fp8 import attention
from targets.honest.table import HONEST
from targets.mutants.table import mutants

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KERNELS = ["targets.builtin.eager_fp8:attention", *(row.target for row in HONEST if set(row.dtypes) <= set(DTYPES))]
DESCALES = ("q_descale", "k_descale", "v_descale")


def reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, is_causal: bool = False,
              **factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(O, L, the largest |v| of each row) in float64, head by head, query by query."""
    batch, heads, rows, dims = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    out = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64)
    lse, size = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64), torch.zeros(batch, heads, rows, 1)
    for b in range(batch):
        for h in range(heads):
            a = [float(factors[n][b, h // group]) if n in factors else 1.0 for n in DESCALES]
            for i in range(rows):
                last = min(keys, i + keys - rows + 1) if is_causal else keys
                if last <= 0:
                    continue
                query, seen = q[b, h, i].double() * a[0], slice(0, last)
                s = (k[b, h // group, seen].double() * a[1]) @ query * (dims**-0.5 if scale is None else scale)
                values = v[b, h // group, seen].double() * a[2]
                lse[b, h, i] = torch.logsumexp(s, 0)
                out[b, h, i] = torch.exp(s - lse[b, h, i]) @ values
                size[b, h, i] = values.abs().max()
    return out, lse, size


def drawn(dtype: str, rows: int, keys: int, *, factors: bool, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (2, 4, rows, 16), "k": (2, 2, keys, 16), "v": (2, 2, keys, 5)}
    given: dict[str, Any] = {n: torch.randn(s, generator=generator).to(DTYPES[dtype]) for n, s in shapes.items()}
    if factors:
        given |= {n: torch.rand(2, 2, generator=generator) + 0.5 for n in DESCALES}
    return given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize(("rows", "keys", "more"), [
    (1, 1, {}), (3, 40, {}), (5, 5, {"is_causal": True}), (2, 33, {"is_causal": True, "scale": 0.7}),
    (5, 2, {"is_causal": True}),
])  # fmt: skip
@pytest.mark.parametrize("factors", [False, True])
def test_agrees_with_plain_loops(
    target: str, dtype: str, rows: int, keys: int, more: dict[str, Any], factors: bool
) -> None:
    given = drawn(dtype, rows, keys, factors=factors) | more
    out, lse = load(target)(**given, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    exact, log, size = reference(**given)
    # e4m3 rounds P by 2^-4 relatively and loses 2^-10 of its sum, unscaled; bfloat16 rounds O by 2^-8.
    assert ((out.double() - exact).abs() <= (2**-4 + 2**-8 + keys * 2**-10 + 1e-5) * size).all()
    assert torch.equal(lse.isinf(), log.isinf())
    assert (lse.double() - log).abs().nan_to_num().max() < 1e-5


def smallest(name: str) -> dict[str, Any]:
    """The input that the mutant's text describes; one query, one dimension."""

    def one_head(k: list[float], v: list[float]) -> dict[str, Any]:
        tensors = {"q": [1.0], "k": k, "v": v}
        return {n: torch.tensor(x).view(1, 1, -1, 1).to(torch.float8_e4m3fn) for n, x in tensors.items()}

    match name:
        case "fp8_weights_unscaled":
            return one_head([0.0, -7.5], [0.0, 448.0])
        case "fp8_normalised_then_cast":
            return one_head([0.0] * 1500, [1.0] * 1500)
        case "fp8_weights_saturate":
            return one_head([0.0, 2.0], [0.0, 1.0])
        case "fp8_factors_of_keys_dropped":
            factors = {n: torch.tensor([[2.0]]) for n in DESCALES}
            return one_head([1.0], [1.0]) | factors
        case _:
            heads = {n: torch.ones(1, 2, 1, 1).to(torch.float8_e4m3fn) for n in "qkv"}
            return heads | {"v_descale": torch.tensor([[1.0, 2.0]])}


@pytest.mark.parametrize("row", [m for m in mutants() if m.dtypes == ("e4m3",)], ids=lambda row: row.name)
def test_a_mutant_differs_on_its_smallest_input(row: Any) -> None:
    given = smallest(row.name)
    right, wrong = attention(**given), load(row.target)(**given)
    exact, _, size = reference(**given)
    room = (2**-4 + 2**-8) * size
    assert wrong.shape == right.shape
    assert wrong.dtype == right.dtype
    assert ((right.double() - exact).abs() <= room).all()
    if row.name == "fp8_weights_unscaled":
        # All of the second key's share is lost: less than P's rounding, and far more than 256 allows.
        assert wrong.abs().max() == 0
        assert right.double().sub(exact).abs().max() < 2**-3 * exact.max()
    else:
        assert ((wrong.double() - exact).abs() > room).any()
