"""Finding targets: files, modules, entry points, objects, names."""

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from targets.calling import registry
from targets.calling.registry import BUILTINS, Unavailable, UnknownTarget, load_builtin, resolve, resolve_all
from targets.calling.target import BadTarget, Target, target_from


def read(function: Any, **more: Any) -> Target:
    return target_from(function, spec="file.py:function", **more)


def q_k_v(q: Any, k: Any, v: Any, scale: Any = None) -> Any:
    return q


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
