"""Reading from a function's parameters which op it is and how it takes the op's arguments."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle.ops.table import op_named
from targets.calling.signature import ALIASES
from targets.calling.target import BadTarget, Target, run, target_from
from targets.probing.tiny import tiny_case


def read(function: Any, **more: Any) -> Target:
    return target_from(function, spec="file.py:function", **more)


@pytest.mark.parametrize(
    ("function", "op", "parameters"),
    [
        (lambda q, k, v: 0, "attention", {"q": "q", "k": "k", "v": "v"}),
        (
            lambda query, key, value, causal=False, sm_scale=None, mask=None: 0,
            "attention",
            {"q": "query", "k": "key", "v": "value", "is_causal": "causal", "scale": "sm_scale", "attn_mask": "mask"},
        ),
        (lambda k, q, v, /: 0, "attention", {"k": None, "q": None, "v": None}),
        (lambda q, k, v, tile=3, **more: 0, "attention", {"q": "q", "k": "k", "v": "v"}),
        (
            lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False: 0,
            "attention_varlen",
            {n: n for n in (*op_named("attention_varlen").inputs, "max_seqlen_q", "max_seqlen_k")}
            | {"is_causal": "causal"},
        ),
        (
            lambda q, k_cache, v_cache, page_table, cache_seqlens, window=None: 0,
            "attention_paged",
            {n: n for n in op_named("attention_paged").inputs} | {"block_table": "page_table", "window_size": "window"},
        ),
        (
            lambda q, k, v, dropout_p=0.0, seed=None: 0,
            "attention",
            {n: n for n in ("q", "k", "v", "dropout_p", "seed")},
        ),
        (lambda q_nope, q_pe, c_kv, k_pe, w_uk, w_uv: 0, "mla", {n: n for n in op_named("mla").inputs}),
        (lambda x, position_ids, base=1e4: 0, "rope", {"x": "x", "positions": "position_ids", "base": "base"}),
        (lambda x, cos, sin: 0, "rope_apply", {"x": "x", "cos": "cos", "sin": "sin"}),
    ],
)
def test_parameters_tell_the_op(function: Callable[..., Any], op: str, parameters: dict[str, str | None]) -> None:
    target = read(function)
    assert target.op == op
    assert dict(target.parameters) == parameters
    assert list(target.parameters) == list(parameters), "the function's own order counts for positional ones"


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("softmax", "softmax"),
        ("my_log_softmax", "log_softmax"),
        ("logsumexp_v2", "logsumexp"),
        ("softmax_fp8", "softmax"),
    ],
)
def test_a_unary_function_is_told_by_its_name(name: str, op: str) -> None:
    def function(t: Any) -> Any:
        return t

    function.__name__ = name
    assert read(function).op == op
    assert dict(read(function).parameters) == {"x": "t"}


@pytest.mark.parametrize(
    ("function", "op", "message"),
    [
        (lambda q, k, v, positions: 0, None, "'positions' is unknown; attention knows alibi_slopes, attn_mask"),
        (lambda a, b, c: 0, None, "(a, b, c) fits no op; name one with --op: attention, attention_backward"),
        (lambda: 0, None, "fits no op"),
        (lambda *a: 0, None, "name it with --op: attention, attention_backward"),
        (lambda a, b: 0, "attention", "op attention needs a parameter 'q'; it has a, b"),
        (lambda k, q, w: 0, "attention", "op attention needs a parameter 'v'; it has k, q, w"),
        (lambda a, b, c, d: 0, "attention", "its required parameter 'd' is unknown"),
        (lambda q, k, v, scale, sm_scale: 0, None, "'scale' and 'sm_scale' both mean scale"),
        (lambda x: 0, "nosuch", "unknown op 'nosuch'; known: attention"),
        (3, None, "is int, not a function"),
    ],
)
def test_what_fits_no_op_is_refused_by_name(function: Any, op: str | None, message: str) -> None:
    with pytest.raises(BadTarget) as refused:
        read(function, op=op)
    assert message in str(refused.value)
    assert "file.py:function" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_op_names_what_positions_mean() -> None:
    assert dict(read(lambda a, b, c: 0, op="attention").parameters) == {"q": "a", "k": "b", "v": "c"}
    assert dict(read(lambda *a, **k: 0, op="mla").parameters) == dict.fromkeys(op_named("mla").inputs)
    assert dict(read(lambda **k: 0, op="rope").parameters) == {"x": "x", "positions": "positions"}


def test_aliases_are_unambiguous_and_of_known_names() -> None:
    names = [n for canonical, others in ALIASES.items() for n in (canonical, *others)]
    assert len(names) == len(set(names))


class Recorder:
    """Keeps how it was called."""

    def __init__(self) -> None:
        self.seen: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args[0] if args else next(iter(kwargs.values()))


def called_with(signature: Callable[..., Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    recorder = Recorder()
    recorder.__signature__ = inspect.signature(signature)  # type: ignore[attr-defined]
    recorder.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
    run(read(recorder), tiny_case("attention", "fp32", queries=3, **options))
    return recorder.seen


def test_required_options_get_the_ops_default() -> None:
    args, kwargs = called_with(lambda q, k, v, sm_scale, causal, attn_mask, return_lse: 0)
    assert not args
    assert set(kwargs) == {"q", "k", "v", "sm_scale", "causal", "attn_mask", "return_lse"}
    assert kwargs["sm_scale"] == 0.25
    assert kwargs["causal"] is False
    assert kwargs["attn_mask"] is None
    assert kwargs["return_lse"] is True
    _, kwargs = called_with(lambda q, k, v, scale, is_causal: 0, scale=2.0, is_causal=True)
    assert kwargs["scale"] == 2.0
    assert kwargs["is_causal"] is True


def test_optional_scales_and_masks_are_left_to_the_target() -> None:
    _, kwargs = called_with(lambda q, k, v, scale=3.0, attn_mask=None, is_causal=True: 0)
    # Whether to be causal is always said: a default of True is a target's own affair.
    assert set(kwargs) == {"q", "k", "v", "is_causal"}
    assert kwargs["is_causal"] is False


def test_positional_parameters_are_passed_in_the_functions_own_order() -> None:
    case = tiny_case("attention", "fp32", queries=3)
    args, _ = called_with(lambda k, q, v, /: 0)
    for given, name in zip(args, ("k", "q", "v"), strict=True):
        assert np.array_equal(given, case.arrays[name])


def test_second_outputs_are_an_lse_only_by_their_shape() -> None:
    def returning(second: Any) -> Target:
        def function(q: Any, k: Any, v: Any) -> Any:
            return q.copy(), second(q, k)

        function.__attn_oracle__ = {"framework": "numpy"}  # type: ignore[attr-defined]
        return read(function)

    case = tiny_case("attention", "fp32", queries=3)
    assert set(run(returning(lambda q, k: q[..., 0].copy()), case).outputs) == {"out", "lse"}
    weights = run(returning(lambda q, k: q @ np.swapaxes(k, -1, -2)), case)
    assert set(weights.outputs) == {"out"}
    assert weights.fault is None
    assert set(run(returning(lambda q, k: None), case).outputs) == {"out"}
    denying = returning(lambda q, k: q[..., 0].copy())
    denying.function.__attn_oracle__["contract"] = {"lse": "absent"}  # type: ignore[attr-defined]
    assert set(run(read(denying.function), case).outputs) == {"out"}
