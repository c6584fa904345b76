"""Options and gradients of the Triton attention kernels, interpreted, against float64 written out apart from them."""

import math

import numpy as np
import pytest
import torch

from meta_tests.kernels.dense_reference import attention as reference
from meta_tests.kernels.dense_reference import gradients
from targets.builtin.triton.flash import attention, attention_backward

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(shape=(2, 2, 40, 16), keys=53, kv_heads=1, value_dim=24, *, dtype=torch.float32, seed=0):
    batch, _, _, dim = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim), (*shape[:3], value_dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


SLOPES = torch.tensor([0.5, 0.0625])
SINKS = torch.tensor([-1.0, 3.0])
BOOLEAN = torch.rand(2, 1, 40, 53, generator=torch.Generator().manual_seed(1)) < 0.6
ADDED = torch.randn(2, 40, 53, generator=torch.Generator().manual_seed(2)).masked_fill(BOOLEAN[1], -math.inf)
ALONE = {
    "causal": {"is_causal": True},
    "window": {"window_size": (17, 9)},
    "left": {"window_size": (5, -1)},
    "right": {"window_size": (-1, 3)},
    "one key": {"window_size": (0, 0)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "boolean": {"attn_mask": BOOLEAN},
    "added": {"attn_mask": ADDED},
}
TOGETHER = {
    "causal window": {"is_causal": True, "window_size": (20, 50)},
    "window softcap sinks": {"window_size": (33, 0), "softcap": 1.5, "sinks": SINKS},
    "alibi per batch, causal, scale": {
        "alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)]), "is_causal": True, "scale": 0.37,
    },
    "everything": {
        "is_causal": True, "window_size": (40, -1), "softcap": 0.9, "alibi_slopes": SLOPES, "sinks": SINKS,
        "attn_mask": BOOLEAN,
    },
    "bias behind a cap": {"softcap": 0.5, "attn_mask": ADDED},
}  # fmt: skip
ALL = ALONE | TOGETHER


def check_forward(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    exact = reference(q, k, v, **options)
    empty = ~exact.visible.any(-1)
    assert not out[torch.from_numpy(empty)].any()
    assert (np.abs(out.double().numpy() - exact.out) <= exact.out_bound()).all()
    infinite = np.isneginf(exact.lse)
    assert (lse.numpy()[infinite] == -np.inf).all()
    error = np.abs(lse.double().numpy()[~infinite] - exact.lse[~infinite])
    assert (error <= exact.lse_bound()[~infinite]).all()


def check_backward(q, k, v, do, **options):
    got = attention_backward(q, k, v, do, **options)
    assert ("dsinks" in got) == ("sinks" in options)
    assert ("dbias" in got) == (options.get("attn_mask") is ADDED)
    expected = gradients(reference(q, k, v, **options), do)
    for name, gradient in got.items():
        value, bound = expected[name]
        if name == "dbias":
            shape = options["attn_mask"].shape
            value, bound = (torch.from_numpy(x).sum_to_size(shape).numpy() for x in (value, bound))
            bound = bound + q.shape[0] * q.shape[1] * 2.0**-24 * np.abs(value)
        assert gradient.dtype == (torch.float32 if name in ("dsinks", "dbias") else q.dtype)
        ratio = np.max(np.abs(gradient.double().numpy() - value) / bound, initial=0.0)
        assert ratio <= 1, f"{name}: error / bound {ratio}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_forward_matches_float64(name, dtype):
    check_forward(*case(dtype=dtype)[:3], **ALL[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_backward_matches_float64(name, dtype):
    check_backward(*case(dtype=dtype), **ALL[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [((1, 1, 1, 1), 1, 1, 1), ((1, 3, 33, 5), 65, 1, 40), ((1, 2, 100, 160), 37, 2, 130)])
def test_shapes_and_more_queries_than_keys(shape, dtype):
    """The last shape has empty rows under a causal mask, and whole tiles of them."""
    heads = shape[0][1]
    tensors = case(*shape, dtype=dtype)
    for options in ({"is_causal": True}, {"window_size": (9, 4), "sinks": SINKS.repeat(2)[:heads]}, {}):
        check_forward(*tensors[:3], **options)
        check_backward(*tensors, **options)


WRONG = {
    "window one wider": ({"window_size": (17, 9)}, {"window_size": (18, 9)}),
    "window one to the right": ({"window_size": (17, 9)}, {"window_size": (16, 10)}),
    "window from the top": ({"window_size": (17, 9)}, {"window_size": (17, 9), "top_left": True}),
    "softcap ignored": ({"softcap": 0.7}, {}),
    "alibi from the top": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES, "top_left": True}),
    "slopes of head 0": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES[:1].expand(2)}),
    "sinks of head 0": ({"sinks": SINKS}, {"sinks": SINKS[:1].expand(2)}),
    "sinks ignored": ({"sinks": SINKS}, {}),
    "mask of batch 0": ({"attn_mask": BOOLEAN}, {"attn_mask": BOOLEAN[:1].expand(2, 1, 40, 53)}),
    "mask inverted": ({"attn_mask": BOOLEAN}, {"attn_mask": ~BOOLEAN}),
    "bias under the cap": ({"softcap": 0.5, "attn_mask": ADDED}, {"attn_mask": ADDED}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_the_bounds_tell_right_from_wrong(name, dtype):
    right, wrong = WRONG[name]
    tensors = case(dtype=dtype)
    for check, arguments in ((check_forward, tensors[:3]), (check_backward, tensors)):
        check(*arguments, **right)
    exact = reference(*tensors[:3], **wrong)
    out = attention(*tensors[:3], **right).double().numpy()
    assert not (np.abs(out - exact.out) <= exact.out_bound()).all()
    got = attention_backward(*tensors, **right)
    expected = gradients(exact, tensors[3])
    for gradient in ("dq", "dk", "dv"):
        value, bound = expected[gradient]
        assert not (np.abs(got[gradient].double().numpy() - value) <= bound).all()


def eager(q, k, v, *, is_causal=False, window_size=(-1, -1), softcap=None, alibi_slopes=None, sinks=None,
          attn_mask=None, scale=None):  # fmt: skip
    """float64 torch, differentiable; no empty rows."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    distance = torch.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2] - torch.arange(s.shape[-1])
    if alibi_slopes is not None:
        s = s - alibi_slopes.reshape(-1, q.shape[1], 1, 1).double() * distance.abs()
    left, right = window_size
    hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0)) | ((distance < 0) & is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse[..., None])[..., : k.shape[2]] @ v, lse


@pytest.mark.parametrize("name", [n for n in ALL if n != "everything"])
def test_gradients_flow_as_torch_computes_them_in_float64(name):
    """Through out and LSE at once, to q, k, v and sinks; float32 keeps 10^-5 of the largest entry."""
    options = {**ALL[name]}
    q, k, v, do = case()
    weight = torch.linspace(-1, 1, 160).reshape(2, 2, 40)
    results = []
    for function, dtype in ((attention, torch.float32), (eager, torch.float64)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        if "sinks" in options:
            options["sinks"] = SINKS.to(dtype, copy=True).requires_grad_()
            leaves.append(options["sinks"])
        if name == "bias behind a cap":
            options["attn_mask"] = ADDED.nan_to_num(neginf=-100.0).to(dtype, copy=True).requires_grad_()
            leaves.append(options["attn_mask"])
        result = function(*leaves[:3], **options, **({"return_lse": True} if function is attention else {}))
        (result[0] * do.to(dtype)).sum().add((result[1] * weight.to(dtype)).sum()).backward()
        results.append([leaf.grad.double() for leaf in leaves])
    for got, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert expected.abs().max() > 0.1


def test_a_target_of_gradients_is_one_of_values_too():
    q, k, v, do = case()
    plain, lse = attention(q, k, v, is_causal=True, return_lse=True)
    with_grad = attention(q.requires_grad_(), k, v, is_causal=True)
    assert torch.equal(plain, with_grad) and with_grad.requires_grad and not lse.requires_grad
    with_grad.backward(do)
    assert torch.equal(q.grad, attention_backward(q.detach(), k, v, do, is_causal=True)["dq"])
    assert k.grad is None
    with pytest.raises(NotImplementedError, match="gradients"):
        attention(q, k, v, alibi_slopes=torch.zeros(2).requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_rows(dtype):
    q, k, v, do = case(dtype=dtype)
    mask = BOOLEAN.clone()
    mask[:, :, 3] = mask[:, :, 32:] = False  # one row inside a tile of the backward pass, one whole tile
    v[:, :, 5] = torch.nan  # hidden from nobody else
    mask[..., 5] = False
    out, lse = attention(q, k, v, attn_mask=mask, return_lse=True)
    assert not out[:, :, 3].any() and not out[:, :, 32:].any()
    assert (lse[:, :, 3] == -math.inf).all() and (lse[:, :, 32:] == -math.inf).all()
    out, lse = attention(q, k, v, attn_mask=mask, sinks=SINKS, return_lse=True)
    assert not out[:, :, 32:].any() and (lse[:, :, 32:] == SINKS[:, None]).all()
    assert torch.equal(
        attention(q, k, v, window_size=(4, 4), sinks=torch.full((2,), -math.inf), return_lse=True)[1],
        attention(q, k, v, window_size=(4, 4), return_lse=True)[1],
    )
    v[:, :, 5] = 0.0
    got = attention_backward(q, k, v, do, attn_mask=mask, sinks=SINKS)
    assert not got["dq"][:, :, 32:].any() and not got["dk"][:, :, 5].any() and not got["dv"][:, :, 5].any()
    assert all(gradient.isfinite().all() for gradient in got.values())


def test_large_sinks_and_far_keys_do_not_overflow():
    q, k, v, do = case()
    for sinks in (torch.full((2,), 1e4), torch.full((2,), -1e4)):
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()
        assert not out.any() if sinks[0] > 0 else torch.equal(out, attention(q, k, v))
        assert all(t.isfinite().all() for t in attention_backward(q, k, v, do, sinks=sinks).values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_nan_stays_away_from_gradients(dtype):
    q, k, v, do = case((1, 1, 150, 16), 150, 1, 24, dtype=dtype)
    clean = attention_backward(q, k, v.clone(), do, window_size=(10, 0))
    v[:, :, 140] = torch.nan  # within the third tile of queries; its rows 128 to 149 see keys from 118 on
    got = attention_backward(q, k, v, do, window_size=(10, 0))
    assert got["dq"][:, :, 140:].isnan().all()
    assert torch.equal(got["dq"][:, :, :128], clean["dq"][:, :, :128])
    assert torch.equal(got["dk"][:, :, :118], clean["dk"][:, :, :118])
    assert torch.equal(got["dv"][:, :, :118], clean["dv"][:, :, :118])


def test_hidden_tiles_are_not_visited(monkeypatch):
    """A window's work does not grow with the keys: rubbish outside it, even NaN, is not read."""
    q, k, v, do = case((1, 1, 64, 16), 320, 1, 16)
    expected = [attention(q, k, v, window_size=(40, 0)), *attention_backward(q, k, v, do, window_size=(40, 0)).values()]
    k[:, :, :192] = v[:, :, :192] = torch.nan
    got = [attention(q, k, v, window_size=(40, 0)), *attention_backward(q, k, v, do, window_size=(40, 0)).values()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_window_and_causal_agree_where_they_mean_the_same():
    q, k, v, do = case()
    pairs = [
        ({"is_causal": True}, {"window_size": (-1, 0)}),
        ({"is_causal": True, "window_size": (7, 3)}, {"window_size": (7, 0)}),
        ({"window_size": (500, 500)}, {}),
        ({"softcap": 0.0}, {}),
        ({"alibi_slopes": torch.zeros(2)}, {}),
    ]
    for one, other in pairs:
        assert torch.equal(attention(q, k, v, **one), attention(q, k, v, **other))
        for a, b in zip(*(attention_backward(q, k, v, do, **o).values() for o in (one, other)), strict=True):
            assert torch.equal(a, b)


def test_layout_of_everything_does_not_matter():
    q, k, v, do = case()
    expected = attention_backward(q, k, v, do, attn_mask=ADDED)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, do)]
    mask = ADDED.mT.contiguous().mT
    for got, want in zip(attention_backward(*turned, attn_mask=mask).values(), expected.values(), strict=True):
        assert torch.equal(got, want)
    broadcast = attention_backward(q, k, v, do[:1, :1, :1, :1].expand(do.shape), attn_mask=ADDED[:1])
    materialised = attention_backward(
        q, k, v, do[:1, :1, :1, :1].expand(do.shape).contiguous(), attn_mask=ADDED[:1].expand(2, 40, 53).contiguous()
    )
    materialised["dbias"] = materialised["dbias"].sum_to_size(1, 40, 53)
    for name, gradient in broadcast.items():
        near = 1e-6 if name == "dbias" else 0.0  # another order of the sum over heads
        assert (gradient - materialised[name]).abs().max() <= near


def test_options_are_checked():
    q, k, v, do = case()
    wrong = [
        ({"window_size": (-2, 0)}, "window_size"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
        ({"sinks": torch.zeros(2, 2)}, "sinks"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **options)
    with pytest.raises(ValueError, match="do must be"):
        attention_backward(q, k, v, do[..., :-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tanh_is_as_exact_as_its_docstring_says(dtype):
    """A softcap of 1 on scores of one dimension is the kernel's tanh, read off the LSE of one key."""
    x = torch.cat([torch.linspace(0, 3, 601), torch.logspace(-30, 2, 400), torch.linspace(0.99, 1.01, 101)]).to(dtype)
    x = torch.cat([x, -x])
    _, lse = attention(x[None, None, :, None], torch.ones(1, 1, 1, 1, dtype=dtype), torch.ones(1, 1, 1, 1, dtype=dtype),
                       scale=1.0, softcap=1.0, return_lse=True)  # fmt: skip
    exact = np.tanh(x.double().numpy())
    error = np.abs(lse[0, 0].double().numpy() - exact)
    assert (error <= 3 * 2.0**-24 * np.abs(exact) + 2.0**-149).all()
    assert error.max() > 0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gradients_of_shared_heads_are_sums(kv_heads):
    heads = 4
    q, k, v, do = case((1, heads, 40, 16), 50, kv_heads, 8)
    shared = attention_backward(q, k, v, do, is_causal=True)
    group = heads // kv_heads
    alone = attention_backward(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), do, is_causal=True)
    assert torch.equal(shared["dq"], alone["dq"])
    for name in ("dk", "dv"):
        parts = alone[name].double().unflatten(1, (kv_heads, group))
        assert (shared[name].double() - parts.sum(2)).abs().max() <= 1e-5 * parts.abs().sum(2).max()
