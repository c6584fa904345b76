"""The gradients of latent attention at DeepSeek-V3's dimensions: all heads computed, a sample of rows certified."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from meta_tests.targets.test_mla_deepseek import CORES, core_case, tensors, within_limits
from oracle.bounds.mla.gradient import bounds
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import declared_forms
from oracle.ops.mla.gradient_case import DC, DQ, DUK, DUV, OUTPUTS, row_count
from targets.calling.gradient import gradient_of
from targets.calling.target import target_from

pytestmark = pytest.mark.deep

LOG = logging.getLogger(__name__)
BLOCKS = ((DQ, 0, 0), (DQ, 0, 127), (DC, 0), (DUK, 77), (DUV, 127))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gradients_keep_their_contract(dtype: str) -> None:
    fmt, length = FORMATS[dtype], 192
    with within_limits():
        forward = core_case(length, length, dtype)
        w_uv, q = forward.arrays["w_uv"], forward.arrays["q_nope"]
        do = fmt.store(np.random.default_rng(3).standard_normal((*q.shape[:3], w_uv.shape[1])))
        case = Case("mla_backward", {**forward.arrays, "do": do}, forward.options)
        for form, core in CORES.items():
            target = gradient_of(target_from(core, spec=form))
            assert target is not None
            forms = declared_forms("mla_backward", core.__attn_oracle__["contract"], dtype)
            found = target.function(**tensors(case.arrays), is_causal=True)
            for key in BLOCKS:
                n = row_count(case, key)
                rows = np.array([0, 1, n // 2, n - 1])
                block = enclose(case, rows=rows, blocks=[key])[0]
                promise = bounds(case, block, forms, dict.fromkeys(OUTPUTS, fmt))[0]
                for name, bounded in promise.items():
                    part, y = block.part(name), found[name].double().numpy()
                    distance = part.distance(block.take(name, y))
                    assert (distance <= bounded.bound).all(), (form, name)
                    LOG.info("%s %s: %.2g of %.2g, size %.2g", form, name, (distance / bounded.bound).max(),
                             bounded.bound.max(), part.upper_abs().max())  # fmt: skip
                    if dtype == "fp32":
                        # Other rows of the same output are none of these: the bound says something.
                        other = block.whole(name, y)[(rows + 3) % n]
                        assert (part.distance(other) > bounded.bound + part.rad).any(), (form, name)
