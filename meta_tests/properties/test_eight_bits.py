"""Inputs in e4m3 and e5m2: which ops take them, what is drawn, what an output may be, what the diagnosis says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle.formats import EIGHT_BITS, FORMATS, STORAGE
from oracle.ops.attention.options import DESCALES
from oracle.ops.contracts import declared_forms, ladder
from oracle.ops.table import ops
from properties.diagnosis.engine import diagnose
from properties.examinations import chosen_dtypes
from properties.inputs.recipes import Mask
from properties.inputs.strategies import attention_input
from properties.judge.judgements import within_bound
from properties.judge.verdict import Verdict
from properties.ops.attention.options import descales, held
from properties.ops.table import properties_for
from properties.subject import PROFILES, Subject, subject_for
from reports.command.options import parsed
from reports.command.request import WrongUse, check, left_out
from targets.calling.gradient import gradient_of
from targets.calling.registry import resolve
from targets.calling.target import run, target_from
from targets.mutants.table import mutant_named
from targets.probing.conformance import check_target
from targets.probing.probes import probe
from targets.probing.tiny import tiny_case

Tensor = torch.Tensor


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, k_descale: Tensor | None = None, attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention in float32, the result in bfloat16; nothing declared."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * q.shape[-1] ** -0.5
    if k_descale is not None:
        scores = scores * k_descale.repeat_interleave(group, 1)[..., None, None]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.float()
    if sinks is None:
        return (torch.softmax(scores, -1).nan_to_num() @ v).bfloat16()
    sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    return (torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ v).bfloat16()


def subject(function: Any = plain, dtype: str = "e4m3", **more: Any) -> Subject:
    return subject_for(target_from(function, spec="plain", op="attention"), dtype, profile=PROFILES["quick"], **more)


def test_attention_alone_takes_them() -> None:
    assert [name for name, op in ops().items() if set(EIGHT_BITS) <= set(op.formats)] == ["attention"]
    assert all(set(STORAGE) <= set(op.formats) for op in ops().values())
    assert chosen_dtypes(resolve("seed_rope_torch"), ["e4m3", "fp16"]) == ("fp16",)
    assert chosen_dtypes(resolve("eager_fp8"), []) == EIGHT_BITS
    undeclared = target_from(plain, spec="plain", op="attention")
    assert chosen_dtypes(undeclared, []) == ("fp32", "fp16", "bf16")
    assert chosen_dtypes(undeclared, ["e5m2"]) == ("e5m2",)


def test_what_takes_none_is_said() -> None:
    with pytest.raises(WrongUse, match="rope, rope_backward takes no e4m3 inputs here"):
        check(parsed(["verify", "triton_rope", "--dtype", "e4m3"]))
    with pytest.raises(WrongUse, match="unknown dtype 'e3m4'; known: fp64, fp32, fp16, bf16, e4m3, e5m2"):
        check(parsed(["verify", "--dtype", "e3m4"]))
    request = parsed(["verify", "triton_rope", "eager_fp8", "--dtype", "e4m3"])
    reasons = dict(left_out(request, check(request)))
    assert reasons["triton_rope"] == "rope takes no e4m3 inputs here"
    assert "eager_fp8" not in reasons


def test_their_gradients_are_not_asked_for() -> None:
    target = resolve("eager_fp8")
    assert gradient_of(replace(target, gradients=True)) is None
    both = gradient_of(replace(target, gradients=True, dtypes=("bf16", "e4m3")))
    assert both is not None
    assert both.dtypes == ("bf16",)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_the_output_is_wider_unless_declared(dtype: str) -> None:
    for declared, output in ((None, "bf16"), ("fp32", "bf16"), ({"output": "fp16"}, "fp16"), ({}, "bf16")):
        forms = declared_forms("attention", declared, dtype)  # type: ignore[arg-type]
        assert {form.output.stored_as for form in forms} == {output}
    assert {form.output.stored_as for form in declared_forms("attention", None, "bf16")} == {None}
    assert ladder("attention", dtype) == ("fp32", "flash")
    one = attention_input(subject(dtype=dtype), sq=2, sk=5)
    assert within_bound(subject(dtype=dtype), one).verdict is Verdict.PASS

    def widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v).float()

    judged = within_bound(subject(widened, dtype), one)
    assert judged.verdict is Verdict.FAIL
    assert "expected bfloat16; the contract's `output` says which" in judged.detail
    assert within_bound(subject(widened, dtype, contract={"output": "fp32"}), one).verdict is Verdict.PASS


def test_a_probe_and_the_conformance_check_know_them() -> None:
    def with_options(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, sinks: Tensor | None = None,
        softcap: float | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Everything is added to scores of its own dtype, which no float8 tensor can be."""
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attn_mask is not None:
            scores = (
                (scores.bfloat16() + attn_mask).float()
                if attn_mask.dtype != torch.bool
                else (scores.masked_fill(~attn_mask, -torch.inf))
            )
        whole = scores
        if sinks is not None:
            sink = (sinks + torch.zeros(1, dtype=torch.bfloat16)).float()[:, None, None]
            whole = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
        out = (torch.softmax(whole, -1)[..., : k.shape[2]] @ v.float()).bfloat16()
        return (out, torch.logsumexp(whole, -1)) if return_lse else out

    with_options.__attn_oracle__ = {"dtypes": ("e4m3",)}  # type: ignore[attr-defined]
    target = target_from(with_options, spec="options", op="attention")
    found = probe(target, "e4m3")
    assert found["softcap_order"] == "before_mask"
    assert found["lse_sink"] == "included"
    assert check_target(with_options, op="attention") == []
    with_options.__attn_oracle__["contract"] = {"output": "fp16"}  # type: ignore[attr-defined]
    assert check_target(with_options, op="attention") == ["e4m3: out has dtype bfloat16, expected float16"]


def test_masks_and_sinks_are_in_bf16() -> None:
    given = attention_input(subject(), kv_heads=2, sq=3, sk=9, mask=Mask("additive"), extras={"sinks": 1.0})
    assert given.case.options["attn_mask"].dtype == given.case.options["sinks"].dtype == FORMATS["bf16"].dtype
    assert within_bound(subject(), given).verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_no_edge_leaves_the_format(dtype: str) -> None:
    """What is too large for it is stored as its largest number, not as NaN."""
    seen = 0
    for row in properties_for("attention"):
        for given in row.edges(subject(dtype=dtype)):
            case = given.case
            for name in "qkv":
                assert case.arrays[name].dtype == FORMATS[dtype].dtype
                assert np.isfinite(case.arrays[name].astype(np.float64)).all(), (row.id, given.features)
            seen += 1
    assert seen > 100


def test_factors_differ_by_head_and_sequence() -> None:
    def factors(value: str) -> dict[str, Any]:
        return {name: descales(name, value, FORMATS["bf16"], {"B": 2, "Hkv": 3}) for name in DESCALES}

    found = factors("heads")
    for values in found.values():
        assert values.shape == (2, 3)
        assert len(np.unique(values)) == 6
    assert all(len(np.unique(values)) == 1 for values in factors("one").values())
    products = found["q_descale"] * found["k_descale"]
    assert not np.isin(products, 1.0).any(), "dropping both would not be seen"


@pytest.mark.parametrize(("mutant", "says"), [
    ("fp8_factors_of_head_zero", "all heads used the factors of head 0"),
    ("fp8_factors_of_keys_dropped", "the factors of k and v were ignored"),
    ("fp8_factors_by_sequence", ""),
])  # fmt: skip
def test_a_defect_of_the_factors_is_named(mutant: str, says: str) -> None:
    held = subject_for(resolve(mutant_named(mutant).target), "e4m3", profile=PROFILES["quick"])
    given = attention_input(held, batch=2, kv_heads=2, sq=4, sk=21, extras={"k_descale": "heads"})
    found = diagnose(held, given.case, seconds=60.0)
    # A mean of factors is none of the hypotheses: where it shows is told.
    assert found == f"as if {says}" if says else found.startswith("wrong ")
    honest = subject_for(resolve("eager_fp8"), "e4m3", profile=PROFILES["quick"])
    assert diagnose(honest, given.case, seconds=60.0) == ""


def test_a_factor_alone_is_asked_for_and_none_in_float64() -> None:
    def of_values(q: Tensor, k: Tensor, v: Tensor, *, v_descale: Tensor | None = None) -> Tensor:
        return plain(q, k, v)

    assert held(subject(of_values)) == ["k_descale"]
    assert any(
        "v_descale" in g.case.options for row in properties_for("attention") for g in row.edges(subject(of_values))
    )
    assert held(subject(of_values, "fp64")) == []
    kept = attention_input(subject(of_values, "fp64"), extras={"k_descale": "heads"})
    assert "v_descale" not in kept.case.options


def test_what_a_function_requires_is_given_where_its_gradient_is_asked_for() -> None:
    def strict(q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor, return_lse: bool) -> Tensor:
        assert q_descale.shape == k.shape[:2]
        assert return_lse is False
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    target = gradient_of(target_from(strict, spec="strict", op="attention"))
    assert target is not None
    case = tiny_case("attention_backward", "fp32")
    seen = run(target, case)
    assert seen.fault is None
    assert set(seen.outputs) == {"dq", "dk", "dv"}


@pytest.mark.parametrize("preset", ["flash", "fp32"])
def test_a_declared_place_of_d_removes_no_form(preset: str) -> None:
    every = declared_forms("attention_backward", preset, "bf16")
    for delta in ("output", "weights"):
        forms = declared_forms("attention_backward", {"preset": preset, "delta": delta}, "bf16")
        assert {f.gradient.delta for f in forms} == {delta}
        assert {(f.sums.splits, f.sums.lag, f.sums.row_sum, f.gradient.dp_stored) for f in forms} == {
            (f.sums.splits, f.sums.lag, f.sums.row_sum, f.gradient.dp_stored) for f in every
        }
        assert {f.label.partition(", D from ")[2] for f in forms} <= {delta, ""}
