"""What a forward pass's convention for rows without a key leaves of the gradients that sum over one."""

from typing import Any

import numpy as np
import pytest
import torch

from oracle.evaluate import enclose
from properties.checks.metamorphic import full_bounds
from properties.judge.empty_rows import promised_rows, unpromised
from properties.judge.pipeline import certify, structure
from properties.judge.verdict import Verdict
from properties.subject import Subject, subject_for
from targets.calling.target import target_from
from targets.probing.tiny import tiny_case

OP = "attention_backward"
# Query 0 sees no key, query 1 the only one.
EMPTY = tiny_case(OP, "fp32", keys=1, is_causal=True, causal_alignment="bottom_right")
FULL = tiny_case(OP, "fp32", is_causal=True, causal_alignment="bottom_right")


def gradients(q: Any, k: Any, v: Any, do: Any, *, is_causal: bool = False, spoil: str = "") -> Any:
    """Right but for what is spoiled."""
    rows, keys = q.shape[2], k.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen = seen.tril(keys - rows) if is_causal else seen
    s = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~seen, -1e300)
    p = torch.where(seen, s.softmax(-1), 0.0)
    dp = do.double() @ v.double().mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    found = {"dq": ds @ k.double(), "dk": ds.mT @ q.double(), "dv": p.mT @ do.double()}
    if spoil:
        found[spoil] = found[spoil] + torch.nan
    return tuple(x.float() for x in found.values())


def subject(convention: str, spoil: str = "") -> Subject:
    def backward(q: Any, k: Any, v: Any, do: Any, *, is_causal: bool = False) -> Any:
        return gradients(q, k, v, do, is_causal=is_causal, spoil=spoil)

    said = {"empty_row": convention, "causal_alignment": "bottom_right"}
    return subject_for(target_from(backward, spec="f", op=OP), "fp32", conventions=said)


@pytest.mark.parametrize(("convention", "left"), [("zero", True), ("nan", True), ("mean", False)])
def test_what_is_finite_is_judged_but_under_a_mean(convention: str, left: bool) -> None:
    given = subject(convention)
    outputs = given.call(EMPTY).outputs
    for block in enclose(EMPTY):
        held = {n: block.take(n, v) for n, v in outputs.items() if block.holds(n)}
        sums = not block.holds("dq")
        assert unpromised(given, EMPTY, block.key) == ("" if convention == "zero" or not sums else convention)
        assert promised_rows(given, EMPTY, block, held).tolist() == ([left] if sums else [False, True])


@pytest.mark.parametrize("convention", ["zero", "nan", "mean"])
@pytest.mark.parametrize("spoil", ["dq", "dk", "dv"])
def test_a_nan_is_excused_where_an_empty_row_is_summed_over_and_nowhere_else(convention: str, spoil: str) -> None:
    given = subject(convention, spoil)
    excused = convention != "zero" and spoil != "dq"
    assert (certify(given, EMPTY).verdict is Verdict.FAIL) is not excused
    assert certify(given, FULL).verdict is Verdict.FAIL
    bounds = full_bounds(given, EMPTY, given.call(EMPTY).outputs)[0]
    assert bool(np.isinf(bounds["dv"]).all()) is (convention != "zero")


def with_sinks(q: Any, k: Any, v: Any, do: Any, *, sinks: Any = None) -> Any:
    found = gradients(q, k, v, do)
    return found if sinks is None else (*found, torch.zeros_like(sinks))


def of_everything(q: Any, k: Any, v: Any, do: Any, *, attn_mask: Any = None, sinks: Any = None) -> Any:
    return (*gradients(q, k, v, do), torch.zeros(1), torch.zeros(1))


def test_answers_are_the_outputs_that_a_function_can_have() -> None:
    case = tiny_case(OP, "fp32", sinks=np.zeros(1, dtype=np.float32))
    seen = subject_for(target_from(with_sinks, spec="f", op=OP), "fp32").call(case)
    assert seen.fault is None and set(seen.outputs) == {"dq", "dk", "dv", "dsinks"}


def test_an_answer_that_the_case_does_not_have_is_an_error_of_the_target() -> None:
    given = subject_for(target_from(of_everything, spec="f", op=OP), "fp32")
    case = tiny_case(OP, "fp32")
    wrong = structure(given, case, given.call(case))
    assert wrong is not None and wrong.verdict is Verdict.ERROR
    assert wrong.detail == "dbias was returned, which this case does not have"
