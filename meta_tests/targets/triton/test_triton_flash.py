"""The Triton attention kernel, interpreted, against float64 softmax attention written out here."""

import math

import numpy as np
import pytest
import torch

from targets.builtin.triton import flash as triton_flash
from targets.builtin.triton.flash import TILE_K, TILE_Q, attention

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
DTYPES = tuple(UNIT)


def case(q_shape, keys, kv_heads, value_dim, dtype, *, seed=0, spread=1.0):
    batch, _, _, dim = q_shape
    generator = torch.Generator().manual_seed(seed)
    shapes = (q_shape, (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (q * spread).to(dtype), k.to(dtype), v.to(dtype)


def reference(q, k, v, *, scale=None, is_causal=False, offset=None):
    """(out, lse, bound of out, bound of lse) in float64, for one program that keeps the contract `flash`.

    The bounds follow from its roundings, u = 2^-24: a score may be off by (d + 8) u sum |scale q k|; an
    exponent by that, by eight roundings of m - S, and by 2^-22 for each exp, of which a key passes one per
    tile; the weights then by e^(2 rho) - 1 at most, since numerator and denominator both move.
    """
    dtype, dim = q.dtype, q.shape[-1]
    group = q.shape[1] // k.shape[1]
    u, u_p = 2.0**-24, 0.0 if dtype == torch.float32 else UNIT[dtype]
    q, k, v = (tensor.double().numpy() for tensor in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    s = scale * q @ np.swapaxes(k, -1, -2)
    magnitude = abs(scale) * np.abs(q) @ np.swapaxes(np.abs(k), -1, -2)
    queries, keys = s.shape[-2:]
    visible = np.ones((queries, keys), bool)
    if is_causal:
        visible = np.arange(keys) <= np.arange(queries)[:, None] + (keys - queries if offset is None else offset)
    s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isinf(m), 0.0, m)
    e = np.exp(s - m)
    row_sum = e.sum(-1, keepdims=True)
    empty = row_sum == 0
    p = e / np.where(empty, 1.0, row_sum)
    out = p @ v
    lse = (m + np.log(np.where(empty, 1.0, row_sum)))[..., 0]

    tiles = -(-keys // TILE_K)
    eps = (dim + 8) * u * magnitude
    rho = np.where(visible, eps + 8 * u * (m - np.where(visible, s, m) + 2 * eps.max(-1, keepdims=True, initial=0)), 0)
    rho = rho.max(-1, keepdims=True, initial=0) + (tiles + 1) * 2.0**-22
    spread_v = p @ np.abs(v)
    sums = (keys + 2 * tiles + 8) * u
    bound = (np.expm1(2 * rho) + u_p + 2 * sums) * (1 + u_p) * spread_v
    bound = bound + UNIT[dtype] * (np.abs(out) + bound) + (keys + 1) * HALF_SUBNORMAL[dtype]
    lse_bound = rho[..., 0] + sums + 4 * u * (np.abs(lse) + np.abs(m[..., 0])) + 2.0**-21
    return out, np.where(empty[..., 0], -np.inf, lse), bound, lse_bound


def check(q, k, v, **options):
    got, lse = attention(q, k, v, return_lse=True, **options)
    out, expected_lse, bound, lse_bound = reference(q, k, v, **options)
    assert got.dtype == q.dtype and tuple(got.shape) == out.shape
    assert lse.dtype == torch.float32 and tuple(lse.shape) == out.shape[:3]
    error = np.abs(got.double().numpy() - out)
    assert (error <= bound).all(), f"error / bound {(error / bound).max()}"
    empty = np.isneginf(expected_lse)
    assert (lse.numpy()[empty] == -np.inf).all() and (got.double().numpy()[empty] == 0).all()
    assert (np.abs(lse.double().numpy()[~empty] - expected_lse[~empty]) <= lse_bound[~empty]).all()
    return error


SHAPES = [  # q shape, keys, KV heads, value dimension
    ((1, 1, 1, 1), 1, 1, 1),
    ((1, 1, 1, 64), TILE_K + 1, 1, 64),
    ((1, 1, TILE_Q, 32), TILE_K, 1, 32),
    ((1, 1, TILE_Q + 1, 32), 2 * TILE_K - 1, 1, 32),
    ((2, 4, 37, 20), 70, 2, 33),
    ((1, 6, 5, 16), 40, 1, 8),
    ((1, 2, 70, 256), 37, 2, 1),
    ((2, 1, 3, 3), 100, 1, 256),
    ((1, 1, 130, 17), 129, 1, 5),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_shape", "keys", "kv_heads", "value_dim"), SHAPES)
def test_matches_float64(q_shape, keys, kv_heads, value_dim, is_causal, dtype):
    check(*case(q_shape, keys, kv_heads, value_dim, dtype), is_causal=is_causal)
    check(*case(q_shape, keys, kv_heads, value_dim, dtype, seed=1, spread=6.0), is_causal=is_causal, scale=0.37)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["scale", "alignment", "causal", "heads", "last key"])
def test_the_bound_above_tells_right_from_wrong(wrong, dtype):
    q, k, v = case((1, 4, 40, 16), 70, 2, 16, dtype)
    got = attention(q, k, v, is_causal=True).double().numpy()
    expected = {
        "scale": lambda: reference(q, k, v, is_causal=True, scale=0.26),
        "alignment": lambda: reference(q, k, v, is_causal=True, offset=0),
        "causal": lambda: reference(q, k, v, is_causal=True, offset=31),
        "heads": lambda: reference(q, k[:, [1, 0]], v[:, [1, 0]], is_causal=True),
        "last key": lambda: reference(q[:, :, -1:], k[:, :, :-1], v[:, :, :-1]),
    }
    out, _, bound, _ = expected[wrong]()
    assert not (np.abs(got[:, :, -out.shape[2] :] - out) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype):
    q, k, v = case((2, 4, 40, 24), 70, 2, 40, dtype)
    expected = attention(q, k, v, is_causal=True, return_lse=True)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    column_major = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    inside = [torch.nn.functional.pad(t, (3, 2, 5, 4), value=torch.nan)[:, :, 5:-4, 3:-2] for t in (q, k, v)]
    for variant in (transposed, column_major, inside):
        assert not any(t.is_contiguous() for t in variant)
        copies = [t.clone() for t in variant]
        for got, want in zip(attention(*variant, is_causal=True, return_lse=True), expected, strict=True):
            assert torch.equal(got, want)
        assert all(torch.equal(t, copy) for t, copy in zip(variant, copies, strict=True))
    shared = [k[:1, :1].expand(2, 2, -1, -1), v[:1, :1].expand(2, 2, -1, -1)]
    assert torch.equal(attention(q, *shared), attention(q, *(t.contiguous() for t in shared)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_what_lies_behind_the_last_key_does_not_matter(rubbish, dtype):
    q, k, v = case((1, 2, 20, 24), 45, 2, 24, dtype)
    cache = [torch.nn.functional.pad(t, (0, 0, 0, 50), value=rubbish)[:, :, :45] for t in (k, v)]
    for got, want in zip(attention(q, *cache, return_lse=True), attention(q, k, v, return_lse=True), strict=True):
        assert torch.equal(got, want)


def test_offsets_have_64_bits(tmp_path):
    """Strides beyond 2^31 elements, in a sparse file of which three pages are touched."""
    gap = 2**31 + 3
    storage = torch.UntypedStorage.from_file(str(tmp_path / "sparse"), True, 4 * gap + 4096)
    wide = torch.empty(0, dtype=torch.float16).set_(storage, 0, (1, 1, 3, 8), (1, 1, gap - 2**30, 1))
    q, k, v = case((1, 1, 3, 8), 3, 1, 8, torch.float16)
    wide.copy_(k)
    assert torch.equal(wide, k)
    assert torch.equal(attention(q, wide, v), attention(q, k, v))
    wide.copy_(v)
    assert torch.equal(attention(q, k, wide), attention(q, k, v))
    wide.copy_(q)
    assert torch.equal(attention(wide, k, v), attention(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys(dtype):
    q, k, v = case((1, 2, 150, 16), 70, 1, 8, dtype)
    check(q, k, v, is_causal=True)  # 80 rows see nothing: one whole tile of queries and part of the next
    nothing = [t[:, :, :0] for t in (k, v)]
    out, lse = attention(q, *nothing, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all() and out.shape == (1, 2, 150, 8)
    v[:, :, 0] = torch.nan
    assert (attention(q, k, v, is_causal=True)[:, :, :80] == 0).all()
    assert attention(q[:, :, :0], k, v).shape == (1, 2, 0, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_exactly_the_rows_that_use_it(dtype):
    q, k, v = case((1, 2, 40, 16), 70, 2, 16, dtype)
    clean, clean_lse = attention(q, k, v, return_lse=True)
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        dirty = {"q": q, "k": k, "v": v} | {name: tensor.clone()}
        dirty[name][0, 1, 33, 5] = torch.nan
        out, lse = attention(**dirty, return_lse=True)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[0, 1, 33 if name == "q" else slice(None), 5 if name == "v" else slice(None)] = True
        assert torch.equal(out.isnan(), hit)
        assert torch.equal(lse.isnan(), hit.all(-1))
        assert torch.equal(out[~hit], clean[~hit]) and torch.equal(lse[~hit.all(-1)], clean_lse[~hit.all(-1)])
    k = k.clone()
    k[0, 0, 50:] = torch.nan  # masked for the first rows, seen by later ones
    out = attention(q, k, v, is_causal=True)
    assert torch.equal(out[0, 0].isnan().any(-1), torch.arange(40) + 30 >= 50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top", [1e3, 1e6, -1e6])
def test_large_logits(top, dtype):
    """Scores grow, fall, or tie at one value, up to 10^6 in size; whole tiles lie far below the maximum."""
    q = torch.ones(1, 1, 3, 16, dtype=dtype)
    v = torch.linspace(-1, 1, 100).to(dtype)[None, None, :, None].expand(1, 1, 100, 4)
    for slope in (torch.linspace(0, 1, 100), torch.linspace(1, 0, 100), torch.ones(100)):
        k = slope[:, None].expand(100, 16).to(dtype)[None, None]
        out, lse = attention(q, k, v, scale=top / 16, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()
        if abs(top) == 1e6 and slope.unique().numel() > 1:  # the runner-up is 10^4 below: its weight is 0
            best = int((slope * top).argmax())
            assert torch.equal(out, v[:, :, best : best + 1].expand(out.shape))
        check(q, k, v, scale=top / 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [1.0, 133120.0, 6e4, 1e-30])
def test_one_key_returns_its_value_bit_for_bit(value, dtype):
    """The exponent is exactly 0, whatever the size of the logit (pytorch#121558: NaN at 133120)."""
    filled = torch.full((1, 1, 2, 64), value).to(dtype)
    filled = torch.where(filled.isinf(), 6e4, filled).to(dtype)
    v = torch.randn(1, 1, 1, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, lse = attention(filled, filled[:, :, :1], v, return_lse=True)
    assert torch.equal(out, v.expand(1, 1, 2, 24))
    logit = filled.double()[..., 0] ** 2 * 64 * 0.125
    assert ((lse.double() - logit).abs() <= 66 * 2.0**-24 * logit + 65 * 2.0**-150).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_values_stay_what_they_are(dtype):
    q, k, _ = case((1, 1, 70, 32), 200, 1, 1, dtype)
    out = attention(q, k, torch.ones(1, 1, 200, 3, dtype=dtype)).double()
    u_p = 0.0 if dtype == torch.float32 else UNIT[dtype]
    assert ((out - 1).abs() <= u_p + UNIT[dtype] + 220 * 2.0**-24).all()


def test_scores_and_sums_are_float32_and_weights_are_cast():
    """What separates `flash` from its neighbours, on inputs where every stage but one is exact."""
    half = torch.float16
    # Scores of 2048 + 1/4: float16 would lose the quarter.
    q = torch.tensor([[[[64.0, 0.5]]]], dtype=half)
    k = torch.tensor([[[[32.0, 0.0], [32.0, 0.5]]]], dtype=half)
    _, lse = attention(q, k, torch.ones(1, 1, 2, 1, dtype=half), scale=1.0, return_lse=True)
    assert abs(lse.item() - (2048 + math.log(1 + math.exp(0.25)))) < 3e-4
    # A row sum in float16 stops at 2048 when ones are added one by one or tile by tile.
    many = torch.zeros(1, 1, 5000, 1, dtype=half)
    _, lse = attention(q[..., :1], many, many, return_lse=True)
    assert abs(lse.item() - math.log(5000)) < 1e-6
    # e^-1 is not a float16 number: its rounding shows in out (weights are cast), not in lse (the sum is not).
    q, k = torch.ones(1, 1, 1, 1, dtype=half), torch.tensor([0.0, -1.0], dtype=half)[None, None, :, None]
    v = torch.arange(1000.0, 1200.0).to(half) * torch.tensor([0.0, 1.0], dtype=half)[:, None]
    out, lse = attention(q, k, v[None, None], scale=1.0, return_lse=True)
    weight, row_sum = math.exp(-1.0), 1 + math.exp(-1.0)
    assert abs(lse.item() - math.log(row_sum)) < 2e-7
    cast, uncast = ((w * v[1].double() / row_sum).half() for w in (float(np.float16(weight)), weight))
    assert torch.equal(out[0, 0, 0], cast) and not torch.equal(cast, uncast)


def test_float32_dots_are_not_tf32():
    q = torch.tensor([[[[1 + 2.0**-20]]]])
    v = torch.full((1, 1, 1, 1), 1 + 2.0**-20)
    out, lse = attention(q, torch.ones(1, 1, 1, 1), v, scale=1.0, return_lse=True)
    assert lse.item() == out.item() == 1 + 2.0**-20


def test_every_element_is_written(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(triton_flash.torch, "empty", lambda *a, **b: empty(*a, **b).fill_(torch.nan))
    for is_causal in (False, True):
        check(*case((2, 2, 70, 5), 37, 1, 9, torch.float32), is_causal=is_causal)


def test_arguments_are_checked():
    q, k, v = case((1, 4, 5, 8), 6, 2, 8, torch.float32)
    wrong = [
        (TypeError, "dtype", (q.double(), k.double(), v.double())),
        (TypeError, "dtype", (q, k.half(), v)),
        (ValueError, r"\[B, H, S, D\]", (q[0], k, v)),
        (ValueError, "disagree", (q, k[:, :, :-1], v)),
        (ValueError, "disagree", (q[..., :-1], k, v)),
        (ValueError, "multiple", (q[:, :3], k, v)),
        (ValueError, "1 to 256", case((1, 1, 2, 257), 2, 1, 8, torch.float32)),
        (ValueError, "1 to 256", case((1, 1, 2, 8), 2, 1, 257, torch.float32)),
    ]
    for error, message, tensors in wrong:
        with pytest.raises(error, match=message):
            attention(*tensors)


def test_declares_what_the_tests_above_have_seen():
    claims = attention.__attn_oracle__
    assert claims["op"] == "attention" and claims["contract"] == "flash"
    assert claims["dtypes"] == tuple(triton_flash.DTYPES.values())
    assert claims["conventions"]["causal_alignment"] == "bottom_right"
    assert claims["conventions"]["empty_row"] == "zero" and claims["conventions"]["empty_row_lse"] == "-inf"
    q, k, v = case((1, 1, 2, 4), 2, 1, 4, torch.float32)
    v[0, 0, 1] = torch.nan  # masked for row 0
    leaks = attention(q, k, v, is_causal=True)[0, 0, 0].isnan().all()
    assert claims["conventions"]["masked_nan"] == ("leaks" if leaks else "blocked")
