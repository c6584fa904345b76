"""The gradient of a target as a target: what it is called with, what it gives, when there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle.case import Case
from oracle.evaluate import enclose
from targets.calling.gradient import gradient_of, with_gradients
from targets.calling.target import Target, run, target_from
from targets.probing.tiny import tiny_case


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, sinks: Any = None) -> Any:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    scores = scores if mask is None else scores + mask
    if sinks is None:
        return torch.softmax(scores, -1) @ v
    extra = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1] @ v


def made(function: Any) -> Target:
    found = gradient_of(target_from(function, spec="file.py:function"))
    assert found is not None
    return found


def close(case: Case, target: Target) -> None:
    seen = run(target, case)
    assert seen.fault is None, seen.fault
    for block in enclose(case):
        for name in block.outputs or seen.outputs:
            assert np.abs(block.take(name, seen.outputs[name]) - block.part(name).hi).max() < 1e-5


def test_a_plain_function_has_gradients() -> None:
    target = made(attend)
    assert (target.name, target.op) == ("function_backward", "attention_backward")
    assert target.forward is not None and target.forward.op == "attention"
    rng = np.random.default_rng(0)
    options: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": rng.standard_normal((2, 3)).astype(np.float32)},
        {"sinks": np.array([0.5], dtype=np.float32)},
    ]
    for more in options:
        close(tiny_case("attention_backward", "fp32", **more), target)


def test_positional_parameters_keep_their_order() -> None:
    def backwards(v: Any, k: Any, q: Any, /) -> Any:
        return attend(q, k, v)

    close(tiny_case("attention_backward", "fp32"), made(backwards))


def test_the_gradient_of_a_rotation_needs_no_input() -> None:
    def rotate(x: Any, positions: Any) -> Any:
        half = x.shape[-1] // 2
        angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    close(tiny_case("rope_backward", "fp32"), made(rotate))


def test_what_torch_cannot_differentiate_is_unsupported() -> None:
    target = made(lambda q, k, v: attend(q, k, v).detach())
    fault = run(target, tiny_case("attention_backward", "fp32")).fault
    assert fault is not None and fault[1].startswith("NotImplementedError: torch cannot differentiate the output")


def test_a_gradient_that_is_missing_is_not_given() -> None:
    target = made(lambda q, k, v: attend(q, k.detach(), v))
    seen = run(target, tiny_case("attention_backward", "fp32"))
    assert set(seen.outputs) == {"dq", "dv"}


@pytest.mark.parametrize("op", ["attention", "attention_backward", None])
def test_targets_are_followed_by_their_gradients(op: str | None) -> None:
    target = target_from(attend, spec="file.py:attend")
    names = [t.op for t in with_gradients([target], op=op)]
    assert names == {None: ["attention", "attention_backward"]}.get(op, [op])


def test_numpy_functions_and_refusals_have_none() -> None:
    def plain(q: Any, k: Any, v: Any) -> Any:
        return q

    plain.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
    assert gradient_of(target_from(plain, spec="f.py:plain")) is None
    plain.__attn_oracle__ = {"gradients": False}  # type: ignore[attr-defined]
    assert gradient_of(target_from(plain, spec="f.py:plain")) is None
    assert gradient_of(target_from(lambda x: x, spec="f.py:softmax", op="softmax")) is None


def test_a_gradient_in_the_list_is_not_made_again() -> None:
    own = target_from(attend, spec="file.py:attend")
    explicit = replace(made(attend), name="attend_backward", forward=None)
    assert with_gradients([own, explicit]) == [own, explicit]
    assert [t.forward is None for t in with_gradients([own])] == [True, False]
