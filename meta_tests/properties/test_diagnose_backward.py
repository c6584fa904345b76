"""Diagnosis of gradients: the defect that a broken backward pass has is the one that is named."""

from __future__ import annotations

import pytest

from properties.bench import PROFILES, Bench, bench_for
from properties.diagnose import diagnose
from properties.diagnose_backward import Pass, computed
from properties.property import properties_for
from properties.search import judge
from properties.verdict import Verdict
from targets.honest.flash_backward import attention_backward
from targets.mutants.table import MUTANTS
from targets.probes import probe
from targets.registry import resolve

NAMED = {
    "backward_delta_dropped": "as if the row sums D were left out of dS",
    "backward_group_not_summed": "as if dk and dv held the share of the first query head of each group only",
    "backward_without_sink_gradient": "as if dsinks were zero",
    "backward_cap_slope_dropped": "as if the gradient passed the soft cap unchanged",
    "backward_key_scale_missing": "as if dk were not multiplied by the scale",
    "backward_bias_gradient_scaled": "as if dbias were multiplied by the scale",
    "backward_causal_top_left": "as if the causal mask were aligned top_left",
}


def bench(spec: str) -> Bench:
    target = resolve(spec, op="attention_backward")
    return bench_for(target, "bf16", conventions=probe(target, "bf16"), profile=PROFILES["quick"])


@pytest.mark.parametrize("name", NAMED)
def test_the_defect_is_named(name: str) -> None:
    row = next(m for m in MUTANTS if m.name == name)
    broken = bench(row.target)
    for prop in properties_for(row.op):
        for edge in prop.edges(broken) if prop.id == row.killed_by else ():
            if judge(broken, prop, edge).verdict is Verdict.FAIL:
                assert diagnose(broken, edge.case) == NAMED[name]
                return
    raise AssertionError("no edge input fails")


def test_where_nothing_fits_the_place_is_named() -> None:
    broken = bench("targets.mutants.backward_weights_in_e4m3:attention_backward")
    prop = next(p for p in properties_for("attention_backward") if p.id == "P14")
    edge = next(e for e in prop.edges(broken) if judge(broken, prop, e).verdict is Verdict.FAIL)
    assert diagnose(broken, edge.case).startswith("wrong in dv")


def test_an_honest_pass_is_left_alone() -> None:
    assert attention_backward.__attn_oracle__["op"] == "attention_backward"  # type: ignore[attr-defined]
    good = bench("targets.honest.flash_backward:attention_backward")
    prop = next(p for p in properties_for("attention_backward") if p.id == "P14")
    edges = list(prop.edges(good))
    assert all(diagnose(good, edge.case) == "" for edge in edges[:4])
    # The pass without a defect is the exact one, up to float64.
    exact = computed(edges[3].case, Pass())
    assert all(value.any() for value in exact.values())
