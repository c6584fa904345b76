"""FlexAttention's wrappers hand our options to torch as what they mean: against float64 written out apart from them."""

import warnings

import numpy as np
import pytest
import torch

from meta_tests.kernels.dense_reference import attention as reference
from targets.third_party import torch_flex as flex

SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.0, 0.5, 0.25]])
BOOLEAN = torch.rand(2, 1, 20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.7},
    "window": {"window_size": (7, 2)},
    "left": {"window_size": (4, -1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES[0]},
    "boolean": {"attn_mask": BOOLEAN},
    "added": {"attn_mask": torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(2))},
    "together": {
        "is_causal": True, "window_size": (9, -1), "softcap": 1.5, "alibi_slopes": SLOPES, "attn_mask": BOOLEAN,
    },
}  # fmt: skip


def case(dtype, keys=30):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 20, 8), (2, 2, keys, 8), (2, 2, keys, 12))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def call(function, *tensors, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises to compile, and how
        return function(*tensors, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_unfused_matches_float64(name, dtype):
    tensors = case(dtype)
    out, lse = call(flex.unfused, *tensors, **OPTIONS[name], return_lse=True)
    exact = reference(*tensors, **OPTIONS[name])
    assert (np.abs(out.double().numpy() - exact.out) <= exact.out_bound()).all()
    seen = exact.visible.any(-1)
    assert not out[torch.from_numpy(~seen)].any() and lse[torch.from_numpy(~seen)].isneginf().all()
    assert (np.abs(lse.double().numpy()[seen] - exact.lse[seen]) <= exact.lse_bound()[seen]).all()


@pytest.mark.parametrize(
    "wrong", [{"window_size": (8, 2)}, {"window_size": (7, 1)}, {"top_left": True}, {"scale": 0.5}]
)
def test_the_bound_tells_right_from_wrong(wrong):
    tensors = case(torch.bfloat16)
    out = call(flex.unfused, *tensors, window_size=(7, 2)).double().numpy()
    exact = reference(*tensors, **({"window_size": (7, 2)} | wrong))
    assert not (np.abs(out - exact.out) <= exact.out_bound()).all()


@pytest.mark.skipif(not flex._has_compiler(), reason="no C++ compiler")
def test_compiled_matches_float64():
    """Two kernels at most: torch keeps one size for itself at first, and then no number, head or length is new."""
    kernels = []
    for keys, heads, options in (
        (30, 4, {"is_causal": True, "softcap": 0.7}),
        (40, 2, {"window_size": (5, -1), "softcap": 1.5, "scale": 0.3}),
        (23, 1, {"window_size": (5, 3), "softcap": 1.5, "scale": 0.3}),
    ):
        q, k, v = case(torch.float32, keys)
        tensors = q[:, :heads], k[:, : max(1, heads // 2)], v[:, : max(1, heads // 2)]
        out = call(flex.compiled, *tensors, **options)
        exact = reference(*tensors, **options)
        assert (np.abs(out.double().numpy() - exact.out) <= exact.out_bound()).all()
        wrong = reference(*tensors, **(options | {"softcap": 1.1}))
        assert not (np.abs(out.double().numpy() - wrong.out) <= wrong.out_bound()).all()
        kernels.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert kernels[1] == kernels[2] <= kernels[0] + 1


@pytest.mark.skipif(not flex._has_compiler(), reason="no C++ compiler")
def test_compiled_alibi_matches_float64():
    """One kernel, whatever the slopes, the numbers of heads, and what is visible."""
    kernels = []
    for keys, heads, slopes, options in (
        (30, 4, SLOPES, {"is_causal": True}),
        (25, 2, SLOPES[0, :2], {}),
        (21, 2, SLOPES[:, 1:3], {"window_size": (5, 3), "scale": 0.3}),
    ):
        q, k, v = case(torch.float32, keys)
        tensors = q[:, :heads], k[:, : heads // 2], v[:, : heads // 2]
        out = call(flex.compiled, *tensors, **options, alibi_slopes=slopes)
        exact = reference(*tensors, **options, alibi_slopes=slopes)
        assert (np.abs(out.double().numpy() - exact.out) <= exact.out_bound()).all()
        wrong = reference(*tensors, **options, alibi_slopes=slopes.flip(-1))
        assert not (np.abs(out.double().numpy() - wrong.out) <= wrong.out_bound()).all()
        kernels.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert kernels[1] == kernels[2] <= kernels[0] + 1


@pytest.mark.parametrize("function", [flex.unfused, flex.compiled])
def test_gradients_on_a_cpu_are_refused(function):
    q, k, v = case(torch.float32)
    with pytest.raises(NotImplementedError, match="forward only"):
        function(q.requires_grad_(), k, v)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(flex, "_has_compiler", lambda: False)
    with pytest.raises(NotImplementedError, match="compiler"):
        flex.compiled(*case(torch.float32))
