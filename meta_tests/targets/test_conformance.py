"""What a target says of itself is held against what it does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from targets.calling import registry
from targets.calling.metadata import METADATA
from targets.calling.registry import BUILTINS, Unavailable, load_builtin
from targets.calling.target import BadTarget, Target, target_from
from targets.probing.conformance import check_target


def read(function: Any, **more: Any) -> Target:
    return target_from(function, spec="file.py:function", **more)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"nam": "x"}, f"unknown metadata key 'nam'; known: {', '.join(METADATA)}"),
        ({"op": "nosuch"}, "unknown op 'nosuch'"),
        ({"dtypes": "fp32"}, "dtypes must be a tuple of names out of fp64, fp32, fp16, bf16, e4m3, e5m2; got 'fp32'"),
        ({"dtypes": ()}, "dtypes must be a tuple"),
        ({"dtypes": ("fp8",)}, "unknown name 'fp8' in dtypes"),
        ({"devices": ("tpu",)}, "unknown name 'tpu' in devices; known: cpu, cuda"),
        ({"contract": "flsh"}, "unknown contract 'flsh' for attention; known: fp64"),
        ({"contract": {"wieghts": "fp16"}}, "unknown contract field 'wieghts'"),
        ({"contract": {"weights": "fp13"}}, "contract field weights is 'fp13'; valid: None, input, fp64"),
        ({"contract": {"row_sum": "sometimes"}}, "row_sum is 'sometimes'; valid: unrounded, rounded, fp64"),
        ({"contract": {"splits": "8"}}, "contract field splits is '8'; valid: a whole number from 1"),
        ({"contract": {"splits": True}}, "contract field splits is True; valid: a whole number from 1"),
        ({"contract": {"flush": 1}}, "contract field flush is 1; valid: False, True"),
        ({"contract": {"tile": 2.5}}, "contract field tile is 2.5; valid: None, a whole number from 1"),
        ({"contract": {"preset": ["flash"]}}, "unknown contract ['flash'] for attention; known: fp64"),
        (
            {"contract": {"lag": 10.0**9}},
            "contract field lag is 1000000000.0; valid: a finite number from 0, below 700",
        ),
        ({"contract": 3}, "contract is int"),
        ({"conventions": {"alignment": "top_left"}}, "unknown convention 'alignment' for attention; known: causal"),
        ({"conventions": {"lse_base": 2}}, "unknown value 2 of convention lse_base; known: e, 2"),
        ({"conventions": ["lse_base"]}, "conventions is list"),
        ({"framework": "jax"}, "unknown framework 'jax'; known: torch, numpy"),
        ({"description": 3}, "description is int"),
        ([], "__attn_oracle__ is list, not a dict"),
    ],
)
def test_wrong_metadata_is_refused_and_does_not_conform(meta: Any, message: str) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return q

    function.__attn_oracle__ = meta  # type: ignore[attr-defined]
    with pytest.raises(BadTarget) as refused:
        read(function)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert any(message in text for text in check_target(function))


def numpy_target(change: Callable[[Any], Any] = lambda out: out, **meta: Any) -> Callable[..., Any]:
    """A correct numpy kernel whose output passes through ``change``; aligned bottom-right, LSE in base e."""

    def attention(q: Any, k: Any, v: Any, *, is_causal: bool = False, return_lse: bool = False) -> Any:
        scores = q.astype(np.float32) @ np.swapaxes(k, -1, -2).astype(np.float32) * np.float32(q.shape[-1] ** -0.5)
        if is_causal:
            sq, sk = scores.shape[-2:]
            scores = np.where(np.tril(np.ones((sq, sk), dtype=bool), sk - sq), scores, np.float32(-np.inf))
        top = np.where(np.isfinite(m := scores.max(-1, keepdims=True)), m, np.float32(0))
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(all="ignore"):
            out = np.where(total > 0, weights @ v.astype(np.float32) / total, np.float32(0)).astype(q.dtype)
            lse = (top + np.log(total))[..., 0]
        return (change(out), lse) if return_lse else change(out)

    attention.__attn_oracle__ = {"framework": "numpy", "dtypes": ("fp32", "fp16"), **meta}  # type: ignore[attr-defined]
    return attention


HONEST = {"causal_alignment": "bottom_right", "lse_base": "e", "empty_row": "zero", "empty_row_lse": "-inf"}


def test_a_target_that_is_as_it_says_conforms() -> None:
    assert check_target(numpy_target(conventions=HONEST)) == []
    assert check_target(target_from(numpy_target(conventions=HONEST), spec="f")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("causal_alignment", "top_left"), ("lse_base", "2"), ("empty_row", "nan"), ("empty_row_lse", "+inf")],
)
def test_a_convention_that_the_probe_contradicts_does_not_conform(name: str, value: str) -> None:
    found = check_target(numpy_target(conventions=HONEST | {name: value}))
    assert found == [
        f"{dtype}: convention {name} is declared {value}, but tiny calls show {HONEST[name]}"
        for dtype in ("fp32", "fp16")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out[..., :-1], "out has shape [1, 1, 2, 15], expected [1, 1, 2, 16]"),
        (lambda out: out.astype(np.float64), "out has dtype float64, expected float32"),
        (lambda out: 1 / 0, "failed: raised: ZeroDivisionError"),
        (lambda out: out.tolist(), "output out is list, not a numpy array"),
    ],
)
def test_a_call_that_goes_wrong_does_not_conform(change: Callable[[Any], Any], message: str) -> None:
    found = check_target(numpy_target(change))
    assert found
    assert found[0].startswith("fp32: ")
    assert message in found[0]


def test_what_is_no_target_does_not_conform() -> None:
    assert "fits no op" in check_target(lambda a, b: 0)[0]
    assert "not among the declared ones" in check_target(numpy_target(), device="cuda")[0]


@pytest.mark.parametrize("builtin", [b for b in BUILTINS if "triton" not in b.requires], ids=lambda b: b.name)
def test_built_in_targets_conform(builtin: registry.Builtin) -> None:
    try:
        target = load_builtin(builtin)
    except Unavailable as reason:
        pytest.skip(str(reason))
    if "cpu" not in target.devices:
        pytest.skip(f"{target.name} runs on {', '.join(target.devices)}")
    assert check_target(target) == []
