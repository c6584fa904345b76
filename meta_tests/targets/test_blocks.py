"""Whole layers, grouped-query and latent attention, against float64 loops over heads and positions."""

import math

import numpy as np
import pytest
import torch

from targets.builtin.mla_block import Settings, Weights, decode, mla_block
from targets.builtin.seed_gqa import GroupedQueryAttention, gqa_block

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# A layer stores some ten intermediates, each the sum of many independent products; their errors add like a walk.
STORES = 16


def turned(row, angles, layout):
    """One vector as complex numbers times e^(i angle)."""
    half = len(row) // 2
    pairs = (row[:half], row[half:]) if layout == "half" else (row[0::2], row[1::2])
    z = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)
    result = np.empty_like(row)
    if layout == "half":
        result[:half], result[half:] = z.real, z.imag
    else:
        result[0::2], result[1::2] = z.real, z.imag
    return result


def attended(q, k, v, scale):
    """Rows of one head: each sees itself and what is before."""
    out = []
    for i, row in enumerate(q):
        s = np.array([scale * math.fsum(row * key) for key in k[: i + 1]])
        p = np.exp(s - s.max())
        out.append(p @ v[: i + 1] / p.sum())
    return np.array(out)


def numbers(tensors):
    return [t if t is None else t.double().numpy() for t in tensors]


def gqa_case(dtype, batch=2, length=9, width=24, heads=4, kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, length, width), (heads * head_dim, width), (kv_heads * head_dim, width),
              (kv_heads * head_dim, width), (width, heads * head_dim))  # fmt: skip
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) / (s[-1] ** 0.5 if i else 1)
               for i, s in enumerate(shapes)]  # fmt: skip
    angle = torch.arange(length, dtype=torch.float64)[:, None] * 100.0 ** -(torch.arange(head_dim // 2) / 4)
    return [t.to(dtype) for t in (*tensors, angle.cos(), angle.sin())]


def gqa_exact(tensors, heads, kv_heads):
    x, w_q, w_k, w_v, w_o, cos, sin = numbers(tensors)
    dim = w_q.shape[0] // heads
    angles = np.arctan2(sin, cos)
    size = np.hypot(sin, cos)  # stored tables are not quite on the circle

    def rotated(rows):
        return np.array([turned(row, a, "half") * np.tile(r, 2) for row, a, r in zip(rows, angles, size, strict=True)])

    result = []
    for one in x:
        outs = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            q, k, v = (one @ w[n * dim : (n + 1) * dim].T for w, n in ((w_q, h), (w_k, g), (w_v, g)))
            outs.append(attended(rotated(q), rotated(k), v, dim**-0.5))
        result.append(np.concatenate(outs, -1) @ w_o.T)
    return np.array(result)


def close(got, exact, dtype):
    assert got.dtype == dtype and got.shape == exact.shape
    error = np.abs(got.double().numpy() - exact)
    return bool(error.max() <= STORES * UNIT[dtype] * np.abs(exact).max())


@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_gqa_block(dtype):
    tensors = gqa_case(dtype)
    got = gqa_block(*tensors, num_heads=4, num_kv_heads=2)
    assert close(got, gqa_exact(tensors, 4, 2), dtype)
    assert not close(got, gqa_exact(tensors, 4, 1), dtype)
    for place in (1, 2, 3, 6):
        wrong = [t.flip(0) if i == place else t for i, t in enumerate(tensors)]
        assert not close(got, gqa_exact(wrong, 4, 2), dtype)


def test_gqa_block_is_the_module():
    x, w_q, w_k, w_v, w_o, cos, sin = gqa_case(torch.float32)
    module = GroupedQueryAttention(d_model=24, num_heads=4, num_kv_heads=2, d_head=8)
    weights = dict(
        zip(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.weight"), (w_q, w_k, w_v, w_o), strict=True)
    )
    module.load_state_dict(weights)
    full = module(x, *(torch.cat((t, t), -1) for t in (cos, sin)))
    assert torch.equal(gqa_block(x, w_q, w_k, w_v, w_o, cos, sin, num_heads=4, num_kv_heads=2), full)


def mla_case(dtype, *, normed, batch=2, length=7, width=20, heads=3, d_h=8, d_v=6, d_c=12, d_r=4, d_cq=10):
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, length, width), (d_c, width), (heads, d_h, d_c), (heads, d_v, d_c), (d_r, width), (d_cq, width),
              (heads, d_h, d_cq), (heads, d_r, d_cq), (width, heads * d_v))  # fmt: skip
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) / (s[-1] ** 0.5 if i else 1)
               for i, s in enumerate(shapes)]  # fmt: skip
    norms = [torch.rand(d, generator=generator, dtype=torch.float64) + 0.5 if normed else None for d in (d_c, d_cq)]
    return [t.to(dtype) for t in tensors], [None if t is None else t.to(dtype) for t in norms]


def mla_exact(tensors, norms, positions, *, base, layout="half", scale=None, eps=1e-6):
    x, w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o = numbers(tensors)
    norm_kv, norm_q = numbers(norms)

    def normed(rows, weight):
        return rows if weight is None else rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * weight

    d_r = w_kr.shape[0]
    result = []
    for one, places in zip(x, np.broadcast_to(positions, x.shape[:2]), strict=True):
        angles = [p * np.array([base ** (-2 * i / d_r) for i in range(d_r // 2)]) for p in places]

        def rotated(rows, angles=angles):
            return np.array([turned(row, a, layout) for row, a in zip(rows, angles, strict=True)])

        c, c_q = normed(one @ w_dkv.T, norm_kv), normed(one @ w_dq.T, norm_q)
        k_r = rotated(one @ w_kr.T)
        outs = []
        for h in range(w_uk.shape[0]):
            k = np.concatenate((c @ w_uk[h].T, k_r), -1)
            q = np.concatenate((c_q @ w_uq[h].T, rotated(c_q @ w_qr[h].T)), -1)
            outs.append(attended(q, k, c @ w_uv[h].T, k.shape[-1] ** -0.5 if scale is None else scale))
        result.append(np.concatenate(outs, -1) @ w_o.T)
    return np.array(result)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("form", ["materialised", "absorbed"])
@pytest.mark.parametrize("normed", [False, True])
def test_mla_block(normed, form, dtype):
    tensors, norms = mla_case(dtype, normed=normed)
    for layout, positions, scale in (
        ("half", torch.arange(7) + 5, None),
        ("interleaved", torch.arange(14).view(2, 7), 0.5),
    ):
        got = mla_block(*tensors[:1], positions, *tensors[1:], num_heads=3, base=100.0, form=form, layout=layout,
                        scale=scale, norm_kv=norms[0], norm_q=norms[1])  # fmt: skip
        exact = mla_exact(tensors, norms, positions.numpy(), base=100.0, layout=layout, scale=scale)
        assert close(got, exact, dtype)
        others = ({"layout": "half" if layout != "half" else "interleaved"}, {"base": 10.0}, {"scale": 3.0})
        for wrong in others:
            options = {"base": 100.0, "layout": layout, "scale": scale} | wrong
            assert not close(got, mla_exact(tensors, norms, positions.numpy(), **options), dtype)
    if normed:
        assert not close(got, mla_exact(tensors, (None, None), positions.numpy(), base=100.0, scale=0.5), dtype)


@pytest.mark.parametrize("form", ["materialised", "absorbed"])
def test_decoding_token_by_token_is_prefill(form):
    tensors, norms = mla_case(torch.float64, normed=True)
    x, weights = tensors[0], Weights(*tensors[1:], *norms)
    settings = Settings(100.0, form=form)
    whole, whole_cache = decode(x, torch.arange(7), None, weights, settings)
    cache, parts = None, []
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 7)):
        part, cache = decode(x[:, start:stop], torch.arange(start, stop), cache, weights, settings)
        parts.append(part)
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-13 * whole.abs().max()
    assert all((a - b).abs().max() <= 1e-14 for a, b in zip(cache, whole_cache, strict=True))
    restarted, _ = decode(x[:, 5:], torch.arange(2), (cache[0][:, :5], cache[1][:, :5]), weights, settings)
    assert (restarted - whole[:, 5:]).abs().max() > 1e-3


def test_wrong_words_are_refused():
    tensors, _ = mla_case(torch.float32, normed=False)
    for wrong in ({"form": "naive"}, {"layout": "pairs"}, {"num_heads": 4}):
        options = {"num_heads": 3, "base": 100.0} | wrong
        with pytest.raises(ValueError, match=r"form|heads"):
            mla_block(tensors[0], torch.arange(7), *tensors[1:], **options)
