"""Gate G3: no verdict where its model is not the target's (soft caps, declared tanh, a second rounding of O).

Of gradients, it sees what no bound does, and lets honest kernels pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle.evaluate import enclose
from oracle.formats import FORMATS
from oracle.ops.contracts import preset_forms
from oracle.ops.table import op_named
from properties.checks import model_gate
from properties.inputs.recipes import Recipe
from properties.inputs.strategies import attention_input
from properties.judge.judgements import within_bound
from properties.judge.verdict import Verdict
from properties.ops.gradients import attention as attention_backward
from properties.subject import PROFILES, subject_for
from targets.calling.registry import resolve
from targets.calling.target import target_from
from targets.honest.describe import describe
from targets.mutants.table import mutant_named
from targets.probing.tiny import tiny_case

Tensor = torch.Tensor


@describe("attention")
def capped_by_exp(q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None = None, return_lse: bool = False) -> Any:
    """Plain attention whose tanh is 1 - 2 / (e^2x + 1)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * (1 - 2 / (torch.exp(2 * (scores / softcap)) + 1))
    out, lse = torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)
    return (out, lse) if return_lse else out


@describe("attention")
def cut(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Any:
    """Attention that forgets twelve bits of its output."""
    out, lse = capped_by_exp(q, k, v, return_lse=True)
    out = (out.view(torch.int32) & -4096).view(torch.float32)
    return (out, lse) if return_lse else out


@pytest.mark.parametrize("softcap", [None, 100.0])
def test_a_soft_cap_made_of_exp_is_honest(softcap: float | None) -> None:
    subject = subject_for(target_from(capped_by_exp, spec="cap", op="attention"), "fp32", profile=PROFILES["quick"])
    given = attention_input(subject, kv_heads=1, sq=512, sk=64, dims=32, recipe=Recipe("normal", 1))
    given = given if softcap is None else replace(given, case=given.case.with_options(softcap=softcap))
    judged = model_gate.check(subject, given)
    assert judged.verdict is Verdict.PASS
    assert (judged.metrics["model_ratio_out"] > 4) == (softcap is not None)


def test_a_contract_that_the_model_does_not_follow_is_reported_only() -> None:
    subject = subject_for(target_from(cut, spec="cut", op="attention"), "fp32", profile=PROFILES["quick"])
    given = attention_input(subject, kv_heads=1, sq=512, sk=64, dims=32, recipe=Recipe("normal", 1))
    assert model_gate.check(subject, given).verdict is Verdict.FAIL
    for fields in ({"tanh": 2.0**-11}, {"tanh_abs": 2.0**-20}, {"output_stores": 2}):
        forms = tuple(form.with_fields(**fields) for form in subject.forms)
        assert model_gate.check(replace(subject, forms=forms), given).verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["flash_backward:attention_backward", "flash_backward_variants:backward_exp2"])
def test_honest_gradients_are_near_their_model(name: str, dtype: str) -> None:
    subject = subject_for(resolve(f"targets.honest.{name}"), dtype, profile=PROFILES["quick"])
    for given in attention_backward.model_edges(subject):
        judged = model_gate.check(subject, given)
        assert judged.verdict is Verdict.PASS
        assert {f"model_ratio_{n}" for n in ("dq", "dk", "dv")} <= set(judged.metrics)
        ratios = {name: value for name, value in judged.metrics.items() if name.startswith("model_ratio")}
        assert all(0.3 < ratio < 1.4 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_small_systematic_error_of_a_gradient_is_seen(dtype: str) -> None:
    """A truncated P stays within the bound of dV."""
    subject = subject_for(resolve(mutant_named("backward_weights_truncated").target), dtype, profile=PROFILES["quick"])
    given = list(attention_backward.model_edges(subject))[1]
    judged = model_gate.check(subject, given)
    assert judged.verdict is Verdict.FAIL
    assert judged.metrics["model_ratio_dv"] > 1.5 > judged.metrics["model_ratio_dq"]
    assert within_bound(subject, given).verdict is Verdict.PASS


@pytest.mark.parametrize("op", ["attention", "attention_paged", "attention_backward", "mla", "mla_backward"])
def test_forms_of_one_model_are_those_that_give_the_same(op: str) -> None:
    case, row = tiny_case(op, "bf16"), op_named(op)
    fields: dict[str, Any] = {"weights": "e4m3", "accumulator": "fp16", "tile": 2, "splits": 2, "lag": 1.0, "exp": 1e-3}
    fields |= {"normalised_p": True, "delta": "weights", "grad_stores": 1, "row_sum": "rounded", "form": "absorbed"}
    forms = list(preset_forms(op, "flash"))
    forms += [forms[0].with_fields(**{name: value}) for name, value in fields.items()]
    models: dict[Any, list[dict[str, Any]]] = {}
    for form in forms:
        made = [row.model(case, b.key, b.rows, form) for b in enclose(case)]
        models.setdefault(row.modelled(form, FORMATS["bf16"]), []).append(
            {f"{at}{n}": y for at, block in enumerate(made) for n, y in block.items()}
        )
    assert 4 < len(models) < len(forms)
    for alike in models.values():
        for other in alike[1:]:
            assert all(np.array_equal(y, other[n], equal_nan=True) for n, y in alike[0].items())
