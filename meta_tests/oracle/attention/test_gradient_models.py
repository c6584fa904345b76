"""Model kernels of gradients keep every contract, and round where it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle.bounds.table import bounds_of
from oracle.case import Case
from oracle.contract.contract import Contract, contract_of
from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import ladder, preset_forms
from oracle.ops.table import op_named

LOGITS = 2.0


def attention(fmt: str, rng: np.random.Generator, **options: Any) -> Case:
    shapes = {"q": (1, 2, 5, 8), "k": (1, 1, 20, 8), "v": (1, 1, 20, 6), "do": (1, 2, 5, 6)}
    arrays = {n: FORMATS[fmt].store(rng.standard_normal(s) * (LOGITS if n == "q" else 1)) for n, s in shapes.items()}
    options = {n: FORMATS[fmt].store(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    return Case("attention_backward", arrays, options)


def mla(fmt: str, rng: np.random.Generator, **options: Any) -> Case:
    shapes = {"q_nope": (2, 2, 5, 6), "q_pe": (2, 2, 5, 4), "c_kv": (2, 9, 12), "k_pe": (2, 9, 4), "w_uk": (2, 6, 12)}
    shapes |= {"w_uv": (2, 3, 12), "do": (2, 2, 5, 3)}
    scales = {"w_uk": 12**-0.5, "w_uv": 12**-0.5, "q_nope": LOGITS}
    arrays = {n: FORMATS[fmt].store(rng.standard_normal(s) * scales.get(n, 1.0)) for n, s in shapes.items()}
    return Case("mla_backward", arrays, options)


CASES = {
    "plain": (attention, {}),
    "causal": (attention, {"is_causal": True, "causal_alignment": "bottom_right"}),
    "rows without keys": (attention, {"window_size": (2, 0), "causal_alignment": "top_left"}),
    "soft cap": (attention, {"softcap": 2.0}),
    "mask and sinks": (attention, {"attn_mask": np.linspace(-1, 1, 100).reshape(5, 20), "sinks": np.array([0.5, -1])}),
    "mla": (mla, {}),
    "mla, causal": (mla, {"is_causal": True, "causal_alignment": "bottom_right"}),
    "mla, rows without keys": (mla, {"is_causal": True}),
}


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_keeps_every_contract(name: str, fmt: str) -> None:
    make, options = CASES[name]
    case = make(fmt, np.random.default_rng(4), **options)
    op = op_named(case.op)
    for preset in ladder(case.op, fmt):
        forms = preset_forms(case.op, preset)
        for block in enclose(case):
            for form, bounded in zip(forms, bounds_of(case.op)(case, block, forms, {}), strict=True):
                modelled = op.model(case, block.key, block.rows, form)
                for output, y in modelled.items():
                    held = block.part(output)
                    assert y.shape == held.hi.shape
                    assert (held.distance(y) <= bounded[output].bound).all(), (form.label, output)


def errors(case: Case, contract: Contract) -> dict[str, float]:
    """The largest error of every gradient that the model of this contract makes."""
    op, found = op_named(case.op), {}
    for block in enclose(case):
        for output, y in op.model(case, block.key, block.rows, contract).items():
            worst = float(block.part(output).distance(y).max())
            found[output] = max(worst, found.get(output, 0.0))
    return found


WIDE = contract_of("x", weights="fp32", output="fp32", delta="weights")
ATTENTION = {
    "dq": {"grad_stores": 1},
    "dk": {"dp_stored": True},
    "dv": {"weights": "bf16"},
}


@pytest.mark.parametrize("output", ATTENTION)
def test_every_stage_of_attention_is_rounded_where_it_is_declared(output: str) -> None:
    case = attention("bf16", np.random.default_rng(5))
    exact, low = errors(case, WIDE), errors(case, WIDE.with_fields(**ATTENTION[output]))  # type: ignore[arg-type]
    assert exact[output] < 2e-5 < 1e-3 < low[output]
    untouched = "dv" if output != "dv" else "dq"
    assert low[untouched] == exact[untouched]


@pytest.mark.parametrize(("field", "form", "output"), [
    ("up", "materialised", "dw_uv"), ("up", "absorbed", "dq_nope"), ("latent", "absorbed", "dw_uv"),
    ("latent", "absorbed", "dc_kv"),
])  # fmt: skip
def test_every_stage_of_mla_is_rounded_where_it_is_declared(field: str, form: str, output: str) -> None:
    case, wide = mla("bf16", np.random.default_rng(6)), WIDE.with_fields(form=form)
    low = wide.with_fields(**{field: "bf16"})  # type: ignore[arg-type]
    assert errors(case, wide)[output] < 2e-5 < 1e-3 < errors(case, low)[output]


def test_d_comes_from_where_the_contract_says() -> None:
    """A rounded O reaches dq through D, and not where D is summed from P and dP."""
    case = attention("bf16", np.random.default_rng(7))
    found = [errors(case, WIDE.with_fields(delta=delta, output="bf16")) for delta in ("output", "weights")]
    wide = [errors(case, WIDE.with_fields(delta=delta)) for delta in ("output", "weights")]
    assert all(error["dq"] < 2e-5 for error in wide)
    assert found[0]["dq"] > found[1]["dq"] > 1e-4
