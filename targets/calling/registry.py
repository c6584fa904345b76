"""Find targets: built-in by name, ``path/to/file.py:function``, ``package.module:attr``, or an entry point.

An explicit request never falls back: what cannot be found raises, in one line that lists what exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from targets.calling.gradient import SUFFIX, forward_of, with_gradients
from targets.calling.target import BadTarget, Target, one_line, target_from

ENTRY_POINTS = "attn_oracle.targets"


class UnknownTarget(ValueError):
    """No such target; the message lists what exists."""


class Unavailable(RuntimeError):
    """The target exists and cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """One row: name, ``module:attr``, origin (``own`` or ``third_party``), and the modules that must be importable.

    by_name: why a run of all targets leaves it out, where it does.
    """

    name: str
    where: str
    origin: str = "own"
    requires: tuple[str, ...] = ("torch",)
    by_name: str = ""


BUILTINS: tuple[Builtin, ...] = (
    Builtin("sdpa_math", "targets.third_party.torch_sdpa:math", "third_party"),
    Builtin("sdpa_flash", "targets.third_party.torch_sdpa:flash", "third_party"),
    Builtin("sdpa_flash_lse", "targets.third_party.torch_sdpa:flash_lse", "third_party"),
    Builtin("sdpa_efficient", "targets.third_party.torch_sdpa:efficient", "third_party"),
    Builtin("sdpa_cudnn", "targets.third_party.torch_sdpa:cudnn", "third_party"),
    Builtin("eager_attention", "targets.builtin.eager:attention"),
    Builtin("eager_attention_fp32", "targets.builtin.eager:attention_fp32"),
    Builtin("eager_fp8", "targets.builtin.eager_fp8:attention"),
    Builtin("flex_attention", "targets.third_party.torch_flex:unfused", "third_party"),
    Builtin(
        "flex_attention_compiled",
        "targets.third_party.torch_flex:compiled",
        "third_party",
        by_name="it is compiled for each combination of options and sizes, some 4 s each: verify it by its name",
    ),
    Builtin("triton_flash", "targets.builtin.triton.flash:attention", requires=("torch", "triton")),
    Builtin(
        "triton_flash_varlen", "targets.builtin.triton.flash_layouts:attention_varlen", requires=("torch", "triton")
    ),
    Builtin("triton_flash_paged", "targets.builtin.triton.flash_layouts:attention_paged", requires=("torch", "triton")),
    Builtin("eager_attention_varlen", "targets.builtin.eager_layouts:attention_varlen"),
    Builtin("eager_attention_paged", "targets.builtin.eager_layouts:attention_paged"),
    Builtin("seed_gqa", "targets.builtin.seed_gqa:attention"),
    Builtin("seed_gqa_block", "targets.builtin.seed_gqa:gqa_block"),
    Builtin("torch_softmax", "targets.third_party.torch_softmax:softmax", "third_party"),
    Builtin("torch_log_softmax", "targets.third_party.torch_softmax:log_softmax", "third_party"),
    Builtin("torch_logsumexp", "targets.third_party.torch_softmax:logsumexp", "third_party"),
    Builtin("torch_softmax_backward", "targets.third_party.torch_softmax:softmax_backward", "third_party"),
    Builtin("seed_rope_numpy", "targets.builtin.seed_rope_numpy:rope", requires=()),
    Builtin("seed_rope_torch", "targets.builtin.seed_rope_torch:rope"),
    Builtin("triton_rope", "targets.builtin.triton.rope:rope", requires=("torch", "triton")),
    Builtin("triton_rope_backward", "targets.builtin.triton.rope:rope_backward", requires=("torch", "triton")),
    Builtin("seed_rope_numpy_backward", "targets.builtin.seed_rope_numpy:rope_backward", requires=()),
    Builtin("seed_rope_torch_backward", "targets.builtin.seed_rope_torch:rope_backward"),
    Builtin("mla_materialised", "targets.builtin.mla_torch:mla_materialised"),
    Builtin("mla_absorbed", "targets.builtin.mla_torch:mla_absorbed"),
    Builtin("mla_backward_torch", "targets.builtin.mla_backward_torch:mla_backward"),
    Builtin("mla_block_materialised", "targets.builtin.mla_block:mla_block_materialised"),
    Builtin("mla_block_absorbed", "targets.builtin.mla_block:mla_block_absorbed"),
    Builtin("triton_mla_decode", "targets.builtin.triton.mla:mla_decode", requires=("torch", "triton")),
)


def resolve(spec: str, *, op: str | None = None) -> Target:
    """The target named by ``spec``. UnknownTarget, BadTarget or Unavailable, each in one line."""
    builtin = next((b for b in BUILTINS if b.name == spec), None)
    if builtin is not None:
        target = load_builtin(builtin)
        if op not in (None, target.op):
            raise BadTarget(f"{spec} is of op {target.op}, not {op}")
        return target
    if ":" in spec:
        place, _, attribute = spec.rpartition(":")
        function = _from_file(place, attribute) if place.endswith(".py") else _from_module(place, attribute)
        return target_from(function, spec=spec, op=op)
    if spec.endswith(".py"):
        raise UnknownTarget(f"{spec!r} names no function; write {spec}:FUNCTION")
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == spec:
            return target_from(_loaded(point.load, spec), spec=spec, op=op, name=spec)
    raise UnknownTarget(
        f"unknown target {spec!r}; known: {', '.join(known_names())}; or file.py:function, package.module:attr"
    )


def resolve_all(specs: Sequence[str], *, op: str | None = None) -> list[Target]:
    """The targets named by ``specs``, each once, and their gradients; those of one name are called by module too."""
    found = with_gradients([_resolved(spec, op) for spec in dict.fromkeys(specs)], op=op)
    for rename in (_by_module, _by_spec):
        shared = Counter(t.name for t in found)
        found = [replace(t, name=rename(t)) if shared[t.name] > 1 else t for t in found]
    return found


def _resolved(spec: str, op: str | None) -> Target:
    """`resolve`, where a function that does not take a backward op's arguments may still be one of its forward op."""
    forward = forward_of(op)
    if forward is None:
        return resolve(spec, op=op)
    try:
        return resolve(spec, op=op)
    except BadTarget as first:
        try:
            return resolve(spec, op=forward)
        except BadTarget:
            raise first from None


def _by_module(target: Target) -> str:
    place = target.spec.rpartition(":")[0]
    return f"{Path(place).stem if place.endswith('.py') else place}.{target.name}" if place else target.name


def _by_spec(target: Target) -> str:
    return target.spec if target.forward is None else target.spec + SUFFIX


def known_names() -> tuple[str, ...]:
    """Built-in names, then those of installed plug-ins (which are not loaded)."""
    return tuple(dict.fromkeys([*(b.name for b in BUILTINS), *plugins()]))


def plugins() -> tuple[str, ...]:
    """Names under which installed packages offer targets."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINTS)}))


def load_builtin(builtin: Builtin) -> Target:
    """Import one row. Unavailable, with the reason, where a required module is missing or does not load."""
    for module in builtin.requires:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"{builtin.name} needs the module {module}, which is not installed")
    module, _, attribute = builtin.where.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{builtin.name} does not load: {one_line(error)}") from error
    return target_from(function, spec=builtin.name, name=builtin.name, origin=builtin.origin)


def _from_file(place: str, attribute: str) -> Callable[..., object]:
    path = Path(place)
    if not path.is_file():
        raise UnknownTarget(f"no file {place!r}")
    path = path.resolve()
    name = f"attn_oracle_target_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        description = importlib.util.spec_from_file_location(name, path)
        if description is None or description.loader is None:
            raise UnknownTarget(f"{place!r} is no Python file")
        module = importlib.util.module_from_spec(description)
        sys.modules[name] = module
        try:
            with _Beside(path.parent):
                _loaded(lambda: description.loader.exec_module(module), place)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[name]
            raise
    return _attribute(sys.modules[name], attribute, place)


class _Beside:
    """While a file is imported its neighbours come first; afterwards last, for what it imports when it is called."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self._folder)

    def __exit__(self, *_: object) -> None:
        if self._folder in sys.path:
            sys.path.remove(self._folder)
        if self._folder not in sys.path:
            sys.path.append(self._folder)


def _from_module(place: str, attribute: str) -> Callable[..., object]:
    with _Beside(Path.cwd()):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
                raise UnknownTarget(f"no module {place!r}") from None
            raise Unavailable(f"{place} needs the module {error.name}, which is not installed") from None
        except (ValueError, TypeError) as error:
            raise UnknownTarget(f"no module {place!r}: {one_line(error)}") from error
        except (Exception, SystemExit) as error:
            raise BadTarget(f"importing {place} failed: {one_line(error)}") from error
    return _attribute(module, attribute, place)


def _attribute(module: Any, attribute: str, place: str) -> Callable[..., Any]:
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            own = [
                n
                for n, v in vars(module).items()
                if callable(v) and not n.startswith("_") and getattr(v, "__module__", None) == module.__name__
            ]
            raise UnknownTarget(f"{place} has no {attribute!r}; it has: {', '.join(own[:20]) or 'no function'}")
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _loaded(load: Callable[[], Any], spec: str) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise BadTarget(f"importing {spec} failed: {one_line(error)}") from error
