"""The properties of softmax_backward, and P14 of softmax: each fails for a wrong kernel and passes for honest ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from properties.judge.verdict import Verdict
from properties.ops.gradients import softmax as softmax_backward
from properties.ops.softmax import table as softmax
from properties.property import Property
from properties.search import hunt
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import target_from
from targets.honest.softmax import log_softmax as honest_log
from targets.honest.softmax import logsumexp as honest_lse
from targets.honest.softmax import softmax as honest
from targets.honest.softmax import softmax_exp2

PROFILE = replace(PROFILES["quick"], examples=5, shrink_seconds=0.0, large=256)
P14 = next(row for row in softmax.PROPERTIES if row.id == "P14")
LEGAL = {Verdict.PASS, Verdict.VACUOUS, Verdict.EXEMPT}


def subject_of(function: Callable[..., Any] | str, op: str, dtype: str, *, contract: str | None = None) -> Subject:
    target = resolve(function) if isinstance(function, str) else target_from(function, spec="small", op=op)
    return subject_for(target, dtype, contract=contract, profile=PROFILE)


def verdicts(subject: Subject, row: Property) -> list[Any]:
    return [record.verdict for record in hunt(subject, row, seed=3)]


def scaled_back(x: Tensor) -> Tensor:
    """softmax whose gradient is 2% too large."""
    y = honest(x.detach())
    back: Tensor = honest(x) * 1.02
    return back + (y - back).detach()


def wrong(change: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A float64 softmax_backward with one defect: ``change(y, dy)`` gives dx."""

    def kernel(y: Any, dy: Any) -> Any:
        return np.asarray(change(y.astype(np.float64), dy.astype(np.float64)).astype(y.dtype))

    kernel.__attn_oracle__ = {"op": "softmax_backward", "framework": "numpy"}  # type: ignore[attr-defined]
    return kernel


def right(y: Any, dy: Any) -> Any:
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def in_place(y: Any, dy: Any) -> Any:
    dx = right(y.astype(np.float64), dy.astype(np.float64)).astype(y.dtype)
    y[...] = dx
    return dx


def uneven(y: Any, dy: Any) -> Any:
    """The sum weighs late entries more."""
    return y * (dy - (y * dy * np.linspace(1.0, 1.05, y.shape[-1])).sum(axis=-1, keepdims=True))


def short_when_long(y: Any, dy: Any) -> Any:
    summed = (y * dy)[..., : 63 if y.shape[-1] > 63 else None].sum(axis=-1, keepdims=True)
    return y * (dy - summed)


def absorbed(y: Any, dy: Any) -> Any:
    """Differences against a row's first cotangent, in half precision."""
    given = (dy - dy[..., :1]).astype(np.float16).astype(np.float64) + dy[..., :1]
    return right(y, given)


WRONG: dict[str, Callable[..., Any]] = {
    "P1": wrong(uneven),
    "P9": wrong(absorbed),
    "P15": in_place,
    "P18": wrong(short_when_long),
    "P23": lambda y, dy: right(y.astype(np.float64), dy.astype(np.float64)),
    "P25": wrong(uneven),
    "P28": wrong(lambda y, dy: right(y, dy) * (1 + 2.0**-7)),
}


@pytest.mark.parametrize("row", softmax_backward.PROPERTIES, ids=lambda row: row.id)
def test_a_wrong_kernel_fails_each_row(row: Property) -> None:
    kernel = WRONG[row.id]
    kernel.__attn_oracle__ = {"op": "softmax_backward", "framework": "numpy"}  # type: ignore[attr-defined]
    assert Verdict.FAIL in verdicts(subject_of(kernel, "softmax_backward", "fp32"), row)


@pytest.mark.parametrize("row", softmax_backward.PROPERTIES, ids=lambda row: row.id)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_and_an_exact_kernel_pass_each_row(row: Property, dtype: str) -> None:
    for kernel in ("torch_softmax_backward", wrong(right)):
        found = verdicts(subject_of(kernel, "softmax_backward", dtype), row)
        assert set(found) <= LEGAL, found
        assert Verdict.PASS in found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize(
    "target", ["torch_softmax", "torch_log_softmax", honest, softmax_exp2, honest_log], ids=lambda t: str(t)[:24]
)
def test_gradients_of_honest_targets_are_within_their_bound(target: Any, dtype: str) -> None:
    op = "log_softmax" if target in ("torch_log_softmax", honest_log) else "softmax"
    if target == "torch_log_softmax" and dtype in ("fp16", "bf16"):
        # Its forward pass keeps the row's sum in the input dtype, which the gradient shows.
        assert Verdict.FAIL in verdicts(subject_of(target, op, dtype), P14)
        found = verdicts(subject_of(target, op, dtype, contract="input"), P14)
    else:
        found = verdicts(subject_of(target, op, dtype), P14)
    assert set(found) <= LEGAL, found
    assert found.count(Verdict.PASS) >= 5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_wrong_gradient_of_a_right_output_fails(dtype: str) -> None:
    assert Verdict.FAIL in verdicts(subject_of(scaled_back, "softmax", dtype), P14)


def test_what_has_no_gradient_is_unsupported() -> None:
    def detached(x: Tensor) -> Tensor:
        return torch.softmax(x.detach(), -1)

    def of_numpy(x: Any) -> Any:
        return x

    of_numpy.__attn_oracle__ = {"op": "softmax", "framework": "numpy"}  # type: ignore[attr-defined]
    for function, op in ((detached, "softmax"), (of_numpy, "softmax"), (honest_lse, "logsumexp")):
        assert set(verdicts(subject_of(function, op, "fp32"), P14)) == {Verdict.UNSUPPORTED}
