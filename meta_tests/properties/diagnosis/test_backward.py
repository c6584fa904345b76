"""Diagnosis of gradients: the defect that a broken backward pass has is the one that is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import failing_case, predict
from properties.diagnosis.engine import diagnose, table_of
from properties.judge.verdict import Verdict
from properties.ops.gradients.backward_pass import Outputs, Pass, computed
from properties.ops.table import properties_for
from properties.search import judge
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target
from targets.honest.flash_backward import attention_backward
from targets.mutants.table import mutant_named, mutants
from targets.probing.probes import probe

NAMED = {
    "backward_delta_dropped": "as if the row sums D were left out of dS",
    "backward_group_not_summed": "as if dk and dv held the share of the first query head of each group only",
    "backward_ignores_mask": (
        "as if P were recomputed without the masks, hidden keys with the largest score of their row"
    ),
    "backward_without_sink_gradient": "as if dsinks were zero",
    "backward_ds_in_fp16": "as if dS were stored in fp16",
    "backward_cap_slope_dropped": "as if the gradient passed the soft cap unchanged",
    "backward_key_scale_missing": "as if dk were not multiplied by the scale",
    "backward_last_query_dropped": "as if the last query reached neither dk nor dv",
    "backward_bias_gradient_scaled": "as if dbias were multiplied by the scale",
    "backward_causal_top_left": "as if the causal mask were aligned to the first key",
    "backward_weights_in_e4m3": "as if P were cast to e4m3 for dv",
    "backward_ignores_cotangent": "as if dO were all ones",
    "backward_accumulates_across_calls": "another result in a second call",
    "mla_backward_delta_dropped": "as if the row sums D were left out of dS",
    "mla_backward_first_head_only": "as if what all heads share had the gradient of the first head only",
    "mla_backward_values_detached": "as if the latents had no gradient through the values",
    "mla_backward_absorbed_key_weights_reversed": "as if dw_uk met the queries of the heads in reverse order",
}
# No output is wrong by more than its bound: one is missing, or only gate G3 tells.
UNNAMED = {
    "backward_returns_no_sink_gradient", "backward_weights_truncated", "mla_backward_intermediates_truncated",
}  # fmt: skip
OPS = ("attention_backward", "mla_backward")


def subject(target: Target, dtype: str = "bf16") -> Subject:
    return subject_for(target, dtype, conventions=probe(target, dtype), profile=PROFILES["quick"])


@pytest.mark.parametrize("name", NAMED)
def test_the_defect_is_named(name: str) -> None:
    row = mutant_named(name)
    broken = subject(resolve(row.target, op=row.op))
    for prop in properties_for(row.op):
        for edge in prop.edges(broken) if prop.id == row.killed_by else ():
            if judge(broken, prop, edge).verdict is Verdict.FAIL:
                assert diagnose(broken, edge.case) == NAMED[name]
                return
    raise AssertionError("no edge input fails")


def test_no_mutant_is_left_out() -> None:
    assert {m.name for m in mutants() if m.op in OPS} == set(NAMED) | UNNAMED


# --- defects that no mutant has ---

SHAPES = {"q": (1, 4, 5, 16), "k": (1, 2, 37, 16), "v": (1, 2, 37, 8), "do": (1, 4, 5, 8)}
MLA_SHAPES = {
    "q_nope": (1, 2, 5, 8), "q_pe": (1, 2, 5, 4), "c_kv": (1, 37, 16), "k_pe": (1, 37, 4), "w_uk": (2, 8, 16),
    "w_uv": (2, 8, 16), "do": (1, 2, 5, 8),
}  # fmt: skip


def case_of(op: str, **options: Any) -> Case:
    rng = np.random.default_rng(3)
    shapes = MLA_SHAPES if op == "mla_backward" else SHAPES
    return Case(op, {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, options)


def after(op: str, change: Callable[[dict[str, Tensor], Outputs], Outputs]) -> Target:
    """The pass in float64 with its inputs given to ``change`` beside its gradients."""
    honest = resolve(f"targets.honest.{'flash_backward' if op == 'attention_backward' else op}:{op}", op=op)
    names = list(MLA_SHAPES if op == "mla_backward" else SHAPES)

    def broken(**given: Any) -> Any:
        arrays = {n: given[n].numpy() for n in names}
        case = Case(op, arrays, {n: v for n, v in given.items() if n not in names and v is not None})
        found = change(given, {n: computed(case, Pass())[n] for n in op_named(op).required_outputs(case)})
        return tuple(torch.tensor(a, dtype=given[names[0]].dtype) for a in found.values())

    return replace(honest, name="broken", function=broken)


def as_of(how: Pass) -> Callable[[dict[str, Tensor], Outputs], Outputs]:
    def change(given: dict[str, Tensor], found: Outputs) -> Outputs:
        arrays = {n: a.numpy() for n, a in given.items() if isinstance(a, Tensor)}
        op = "mla_backward" if "c_kv" in arrays else "attention_backward"
        options = {n: v for n, v in given.items() if n not in arrays and v is not None}
        return {n: a for n, a in computed(Case(op, arrays, options), how).items() if n in found}

    return change


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (Pass(keys=lambda n: np.arange(n) < n - 1), "as if the last key was missing"),
        (Pass(keys=lambda n: np.arange(n) < n - 5), "as if the last 5 keys were missing"),
        (Pass(queries=lambda n: np.arange(n) < n - 1, rows=True), "as if the last query was missing"),
        (Pass(keys=lambda n: np.arange(n) % 16 != 15), "as if the last key of every full tile of 16 were missing"),
    ],
)
def test_what_is_left_out_is_named(op: str, how: Pass, says: str) -> None:
    broken = subject(after(op, as_of(how)), "fp32")
    assert diagnose(broken, case_of(op)) == says


@pytest.mark.parametrize("op", OPS)
def test_noise_is_placed_and_not_explained(op: str) -> None:
    def noisy(given: dict[str, Tensor], found: Outputs) -> Outputs:
        return {n: a + 0.1 * np.random.default_rng(a.size).standard_normal(a.shape) for n, a in found.items()}

    assert diagnose(subject(after(op, noisy), "fp32"), case_of(op)).startswith("wrong in ")


@pytest.mark.parametrize("op", OPS)
def test_a_stage_that_rounds_within_the_bound_has_no_diagnosis(op: str) -> None:
    # bf16 stores what fp32 computes: a diagnosis needs an error beyond the bound.
    assert diagnose(subject(after(op, lambda given, found: found), "bf16"), bf16(case_of(op))) == ""


def bf16(case: Case) -> Case:
    store = FORMATS["bf16"].store
    return case.with_arrays(**{n: store(a.astype(np.float64)) for n, a in case.arrays.items()})


@pytest.mark.parametrize("op", OPS)
def test_no_defect_stumbles_over_odd_shapes(op: str) -> None:
    honest = subject(after(op, lambda given, found: found), "fp32")
    tried = 0
    for case in (case_of(op), case_of(op, is_causal=True, causal_alignment="bottom_right"), *more_cases(op)):
        said = []
        outputs = {n: a.astype(np.float32) for n, a in computed(case, Pass()).items()}
        failing = failing_case(honest, case, outputs)
        for row in table_of(op).hypotheses:
            for c in row.imagine(failing):
                for b in failing.blocks:
                    predicted = predict(failing, c, b.block.key, b.block.rows, honest.forms)[0]
                    shapes = {n: p.value.hi.shape for n, p in predicted.items()}
                    assert shapes == {n: values.shape for n, values in b.values.items()}
                said.append(c.sentence)
                tried += 1
        assert len(set(said)) == len(said)
    assert tried > 50


def more_cases(op: str) -> Iterator[Case]:
    if op == "mla_backward":
        one = {n: (1,) * len(shape) for n, shape in MLA_SHAPES.items()}
        yield Case(op, {n: np.ones(s, dtype=np.float32) for n, s in one.items()})
        return
    yield Case(op, {n: np.ones((1, 1, 1, 1), dtype=np.float32) for n in SHAPES}, {"scale": -2.0})
    rng = np.random.default_rng(5)
    mask = np.where(rng.random((4, 5, 37)) < 0.3, -np.inf, 1.0).astype(np.float32)
    yield case_of(op, attn_mask=mask, softcap=5.0, sinks=np.ones(4, dtype=np.float32))
    yield case_of(op, window_size=(3, 1), alibi_slopes=np.ones(4, dtype=np.float32), attn_mask=mask > 0)


def test_an_honest_pass_is_left_alone() -> None:
    assert attention_backward.__attn_oracle__["op"] == "attention_backward"  # type: ignore[attr-defined]
    good = subject(resolve("targets.honest.flash_backward:attention_backward", op="attention_backward"))
    prop = next(p for p in properties_for("attention_backward") if p.id == "P14")
    edges = list(prop.edges(good))
    assert all(diagnose(good, edge.case) == "" for edge in edges[:4])
    # The pass without a defect is the exact one, up to float64.
    exact = computed(edges[3].case, Pass())
    assert all(value.any() for value in exact.values())
