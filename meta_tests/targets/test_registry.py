"""Finding targets, and reading from a function's parameters which op it is and how it takes the op's arguments."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oracle.ops.table import op_named
from targets.calling import registry
from targets.calling.metadata import METADATA
from targets.calling.registry import BUILTINS, Unavailable, UnknownTarget, load_builtin, resolve, resolve_all
from targets.calling.signature import ALIASES
from targets.calling.target import BadTarget, Target, run, target_from
from targets.probing.conformance import check_target
from targets.probing.tiny import tiny_case

# --- signatures -------------------------------------------------------------------------------------------------------


def q_k_v(q: Any, k: Any, v: Any, scale: Any = None) -> Any:
    return q


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


# --- things that can be called ----------------------------------------------------------------------------------------


class Attention:
    """A target as a class."""

    __attn_oracle__: Mapping[str, Any] = MappingProxyType({"dtypes": ("fp32",)})

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return q


def test_partials_wrappers_objects_and_classes_are_targets() -> None:
    @functools.wraps(q_k_v)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return q_k_v(*args, **kwargs)

    for function in (functools.partial(q_k_v, scale=1.0), wrapped, Attention(), Attention, Attention().__call__):
        assert read(function).op == "attention", function
    assert read(Attention).dtypes == read(Attention()).dtypes == ("fp32",)
    described = functools.partial(functools.partial(Attention(), v=None))
    assert read(described).dtypes == ("fp32",)


def test_torch_modules_are_read_by_their_forward() -> None:
    import torch

    class Module(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
            return q

    for function in (Module(), Module):
        assert dict(read(function).parameters) == {"q": "q", "k": "k", "v": "v", "is_causal": "is_causal"}


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


# --- metadata and conformance -----------------------------------------------------------------------------------------


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
        ({"contract": {"weights": "fp13"}}, "unknown format 'fp13'"),
        ({"contract": {"row_sum": "sometimes"}}, "cannot be used"),
        ({"contract": {"splits": "8"}}, "contract field splits is '8', not int"),
        ({"contract": {"splits": True}}, "contract field splits is True, not int"),
        ({"contract": {"flush": 1}}, "contract field flush is 1, not bool"),
        ({"contract": {"tile": 2.5}}, "contract field tile is 2.5, not int | None"),
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


# --- where targets are found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builtin", BUILTINS, ids=lambda b: b.name)
def test_every_built_in_target_resolves(builtin: registry.Builtin) -> None:
    try:
        target = resolve(builtin.name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert (target.name, target.origin) == (builtin.name, builtin.origin)
    assert target.description, "it says nothing about itself in `attn-oracle targets`"


def test_a_built_in_target_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "kernel_without_library.py").write_text("raise OSError('libcuda.so is missing')\n")
    for row, message in (
        (registry.Builtin("x", "y:z", requires=("a_module_that_is_missing",)), "x needs the module a_module_that_is"),
        (registry.Builtin("x", "kernel_without_library:z", requires=()), "x does not load: OSError: libcuda.so"),
    ):
        with pytest.raises(Unavailable, match=message):
            load_builtin(row)


def test_a_file_is_imported_once_and_finds_its_neighbours_when_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_now.py").write_text("WIDTH = 3")
    (tmp_path / "beside_later.py").write_text("WIDTH = 5")
    (tmp_path / "kernel.py").write_text(
        "import beside_now\n\n\ndef attention(q, k, v):\n    import beside_later\n    return beside_later.WIDTH\n\n\n"
        "other = attention\n"
    )
    first, second = (resolve(f"{tmp_path / 'kernel.py'}:{name}") for name in ("attention", "other"))
    assert first.function is second.function
    assert first.function(0, 0, 0) == 5


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel_package_here").mkdir()
    (tmp_path / "kernel_package_here" / "__init__.py").write_text("def attention(q, k, v): return q\n")
    assert resolve("kernel_package_here:attention").op == "attention"
    with pytest.raises(UnknownTarget, match="it has: attention"):
        resolve("kernel_package_here:nosuch")


def test_a_module_that_needs_what_is_missing_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    (tmp_path / "kernel_without.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(Unavailable, match="needs the module a_module_that_is_missing"):
        resolve("kernel_without:attention")
    with pytest.raises(UnknownTarget, match="no module 'kernel_nowhere'"):
        resolve("kernel_nowhere:attention")


def test_entry_points_are_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (
        EntryPoint("their_kernel", f"{__name__}:q_k_v", registry.ENTRY_POINTS),
        EntryPoint("their_broken_one", "a_module_that_is_missing:f", registry.ENTRY_POINTS),
    )
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(q_k_v=q_k_v))
    assert resolve("their_kernel").name == "their_kernel"
    with pytest.raises(BadTarget, match="a_module_that_is_missing"):
        resolve("their_broken_one")
    with pytest.raises(UnknownTarget, match="their_broken_one, their_kernel"):
        resolve("their_other_kernel")


def test_names_tell_targets_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def attention(q, k, v): return q\n\n\ndef sdpa_math(q, k, v): return q\n")
    one, two = f"{tmp_path / 'one.py'}", f"{tmp_path / 'two.py'}"
    specs = [f"{one}:attention", f"{two}:attention", f"{one}:sdpa_math", "sdpa_math", f"{one}:attention"]
    names = ["one.attention", "two.attention", "one.sdpa_math", "sdpa_math"]
    # Each is followed by its gradient.
    found = [t.name for t in resolve_all(specs)]
    assert (found[::2], found[1::2]) == (names, [f"{name}_backward" for name in names])
    assert [t.name for t in resolve_all(specs[:1], op="attention")] == ["attention"]
