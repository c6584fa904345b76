"""The Triton MLA decoding kernels, interpreted, against MLA with keys and values built per head in float64."""

import math

import numpy as np
import pytest
import torch

from meta_tests.kernels.dense_reference import UNIT
from meta_tests.kernels.dense_reference import attention as reference
from targets.builtin.triton.mla import MOST_SPLITS, SPLIT_KEYS, mla_decode

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(dtype, *, batch=2, heads=3, queries=2, keys=150, d_h=16, d_r=8, d_c=24, d_v=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads, queries, d_h), (batch, heads, queries, d_r), (batch, keys, d_c), (batch, keys, d_r),
        (heads, d_h, d_c), (heads, d_v, d_c),
    )  # fmt: skip
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for weight in tensors[4:]:
        weight /= math.sqrt(d_c)
    return [t.to(dtype) for t in tensors]


def exact(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, **options):
    """Dense attention in float64 over keys and values per head."""
    wide = [t.double() for t in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv)]
    content = torch.einsum("hdc,bsc->bhsd", wide[4], wide[2])
    v = torch.einsum("hdc,bsc->bhsd", wide[5], wide[2])
    k = torch.cat((content, wide[3][:, None].expand(-1, content.shape[1], -1, -1)), -1)
    return reference(torch.cat((wide[0], wide[1]), -1), k, v, **options)


def tolerances(tensors, dense, scale):
    """(of out, of lse): how far the stages that the docstring names may carry it.

    U the dtype's unit, u = 2^-24: q~ errs by U |q~| + d_h u |W_UK|^T|q^C| in its entries, hence a score by scale times
    that times |c|, and by (d_c + d_r + 8) u of the magnitudes multiplied; P by U; a weight by twice the worst of a
    row. The latent's accumulation over n keys and the merge count 2 (n + 40) u, the last product d_c u.
    """
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (t.double().numpy() for t in tensors)
    unit, u = UNIT[tensors[0].dtype], 2.0**-24
    low = unit if unit > u else 0.0
    q_lat = np.einsum("bhqd,hdc->bhqc", q_nope, w_uk)
    envelope = np.einsum("bhqd,hdc->bhqc", np.abs(q_nope), np.abs(w_uk))
    wrong = low * np.abs(q_lat) + (q_nope.shape[-1] + 1) * u * envelope
    chain = np.abs(q_lat) + wrong
    sizes = np.einsum("bhqc,bsc->bhqs", chain, np.abs(c_kv)) + np.einsum("bhqr,bsr->bhqs", np.abs(q_pe), np.abs(k_pe))
    eps = np.einsum("bhqc,bsc->bhqs", wrong, np.abs(c_kv)) + (c_kv.shape[-1] + q_pe.shape[-1] + 8) * u * sizes
    eps = scale * np.where(dense.visible, eps, 0.0).max(-1, keepdims=True, initial=0.0) + dense.rho
    keys = c_kv.shape[1]
    inner = np.expm1(2 * eps) + 2 * (keys + 40) * u
    values = np.einsum("hvc,bsc->bhsv", np.abs(w_uv), np.abs(c_kv))
    error = (inner + low + (c_kv.shape[-1] + 2) * u) * (1 + low) * (dense.p @ values)
    out = error + unit * (np.abs(dense.out) + error) + 2.0**-24 * (unit == 2.0**-11)
    return out, eps[..., 0] + (keys + 40) * u + 8 * u * np.abs(np.where(np.isinf(dense.lse), 0, dense.lse)) + 8 * u


def holds(got, tensors, *, scale=None, **options):
    factor = (tensors[0].shape[-1] + tensors[1].shape[-1]) ** -0.5 if scale is None else scale
    dense = exact(*tensors, scale=scale, **options)
    near, near_lse = tolerances(tensors, dense, factor)
    out, lse = got
    empty = ~dense.visible.any(-1)
    assert not out[torch.from_numpy(empty)].any() and (lse.numpy()[empty] == -np.inf).all()
    right = np.abs(out.double().numpy() - dense.out) <= near
    right_lse = np.abs(lse.double().numpy()[~empty] - dense.lse[~empty]) <= near_lse[~empty]
    return bool(right.all() and right_lse.all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.8}], ids=str)
@pytest.mark.parametrize("shape", [
    {},
    {"keys": 1, "queries": 1},
    {"keys": SPLIT_KEYS * MOST_SPLITS + 37, "queries": 1, "batch": 1},
    {"queries": 20, "keys": 70, "heads": 1, "d_c": 130, "d_v": 65, "d_h": 65, "d_r": 4},
    {"queries": 9, "keys": 5, "d_c": 1, "d_h": 1, "d_r": 2, "d_v": 1},
], ids=str)  # fmt: skip
def test_matches_float64(shape, options, dtype):
    tensors = case(dtype, **shape)
    got = mla_decode(*tensors, return_lse=True, **options)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert holds(got, tensors, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tolerances_tell_right_from_wrong(dtype):
    tensors = case(dtype, queries=20)
    got = mla_decode(*tensors, is_causal=True, return_lse=True)
    assert holds(got, tensors, is_causal=True)
    assert not holds(got, tensors)
    assert not holds(got, tensors, is_causal=True, top_left=True)
    assert not holds(got, tensors, is_causal=True, scale=0.25)
    for place, other in ((3, tensors[3].roll(1, 1)), (5, tensors[5].flip(0)), (4, tensors[4].flip(0))):
        changed = [other if i == place else t for i, t in enumerate(tensors)]
        assert not holds(got, changed, is_causal=True)


def test_layout_does_not_matter_and_inputs_stay():
    tensors = case(torch.bfloat16)
    expected = mla_decode(*tensors, is_causal=True, return_lse=True)
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors]
    padded = [torch.nn.functional.pad(t, (2, 3, 1, 2), value=torch.nan)[..., 1:-2, 2:-3] for t in tensors]
    for variant in (turned, padded):
        copies = [t.clone() for t in variant]
        for got, want in zip(mla_decode(*variant, is_causal=True, return_lse=True), expected, strict=True):
            assert torch.equal(got, want)
        assert all(torch.equal(t, copy) for t, copy in zip(variant, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_keys_and_with_nan(dtype):
    tensors = case(dtype, keys=0)
    out, lse = mla_decode(*tensors, return_lse=True)
    assert not out.any() and lse.isneginf().all() and out.shape == (2, 3, 2, 20)
    tensors = case(dtype)
    clean = mla_decode(*tensors)
    tensors[0][0, 1, 1, 3] = torch.nan
    out = mla_decode(*tensors)
    assert out[0, 1, 1].isnan().all()
    out[0, 1, 1] = clean[0, 1, 1]
    assert torch.equal(out, clean)


def test_arguments_are_checked():
    tensors = case(torch.float32)
    with pytest.raises(TypeError, match="dtype"):
        mla_decode(*(t.double() for t in tensors))
    with pytest.raises(ValueError, match="k_pe"):
        mla_decode(*tensors[:3], tensors[3][:, 1:], *tensors[4:])
    with pytest.raises(ValueError, match="ranks"):
        mla_decode(tensors[0][0], *tensors[1:])
    with pytest.raises(ValueError, match="512"):
        mla_decode(*case(torch.float32, d_c=513, keys=2))
