"""Gradients of torch's SDPA come through the targets' functions, on the backends that a CPU has."""

import numpy as np
import pytest
import torch

from meta_tests.kernels.dense_reference import attention as reference
from meta_tests.kernels.dense_reference import gradients
from targets.third_party import torch_sdpa as sdpa


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.4}], ids=str)
@pytest.mark.parametrize("function", [sdpa.math, sdpa.flash, sdpa.flash_lse])
def test_gradients_are_those_of_the_definition(function, options, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(2, 4, n, 16, generator=generator, dtype=torch.float64).to(dtype) for n in (20, 20, 20, 20)
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    function(*leaves, **options).backward(do)
    exact = gradients(reference(q, k, v, top_left=True, **options), do)
    wrong = gradients(reference(q, k, v, scale=0.3), do)
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        value, bound = exact[name]
        # torch multiplies q and k by the root of the scale, one rounding more in each of them.
        assert (np.abs(leaf.grad.double().numpy() - value) <= 2 * bound).all()
        value, bound = wrong[name]
        assert not (np.abs(leaf.grad.double().numpy() - value) <= 2 * bound).all()
