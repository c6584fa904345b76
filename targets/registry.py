"""Find targets: built-in by name, ``path/to/file.py:function``, ``package.module:attr``, or an entry point.

An explicit request never falls back: what cannot be found raises, in one line that lists what exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from targets.base import BadTarget, Target, target_from

ENTRY_POINTS = "attn_oracle.targets"


class UnknownTarget(ValueError):
    """No such target; the message lists what exists."""


class Unavailable(RuntimeError):
    """The target exists and cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """One row: name, ``module:attr``, origin (``own`` or ``third_party``), and the modules that must be importable."""

    name: str
    where: str
    origin: str = "own"
    requires: tuple[str, ...] = ("torch",)


BUILTINS: tuple[Builtin, ...] = (
    Builtin("sdpa_math", "targets.sdpa:math", "third_party"),
    Builtin("sdpa_flash", "targets.sdpa:flash", "third_party"),
    Builtin("sdpa_flash_lse", "targets.sdpa:flash_lse", "third_party"),
    Builtin("sdpa_efficient", "targets.sdpa:efficient", "third_party"),
    Builtin("sdpa_cudnn", "targets.sdpa:cudnn", "third_party"),
    Builtin("eager_attention", "targets.eager:attention"),
    Builtin("eager_attention_fp32", "targets.eager:attention_fp32"),
    Builtin("triton_flash", "targets.triton_flash:attention", requires=("torch", "triton")),
    Builtin("seed_gqa", "targets.seed_gqa:attention"),
    Builtin("torch_softmax", "targets.torch_softmax:softmax", "third_party"),
    Builtin("torch_log_softmax", "targets.torch_softmax:log_softmax", "third_party"),
    Builtin("torch_logsumexp", "targets.torch_softmax:logsumexp", "third_party"),
    Builtin("seed_rope_numpy", "targets.seed_rope_numpy:rope", requires=()),
    Builtin("seed_rope_torch", "targets.seed_rope_torch:rope"),
    Builtin("triton_rope", "targets.triton_rope:rope", requires=("torch", "triton")),
    Builtin("mla_materialised", "targets.mla_torch:mla_materialised"),
    Builtin("mla_absorbed", "targets.mla_torch:mla_absorbed"),
)


def resolve(spec: str, *, op: str | None = None) -> Target:
    """The target named by ``spec``. UnknownTarget, BadTarget or Unavailable, each in one line."""
    builtin = next((b for b in BUILTINS if b.name == spec), None)
    if builtin is not None:
        return load_builtin(builtin)
    if ":" in spec:
        place, _, attribute = spec.rpartition(":")
        function = _from_file(place, attribute) if place.endswith(".py") else _from_module(place, attribute)
        return target_from(function, spec=spec, op=op)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == spec:
            return target_from(_loaded(point.load, spec), spec=spec, op=op, name=spec)
    names = [b.name for b in BUILTINS] + [p.name for p in entry_points(group=ENTRY_POINTS)]
    raise UnknownTarget(f"unknown target {spec!r}; known: {', '.join(names)}; or file.py:function, package.module:attr")


def load_builtin(builtin: Builtin) -> Target:
    """Import one row. Unavailable, with the reason, where a required module is missing."""
    for module in builtin.requires:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"{builtin.name} needs the module {module}, which is not installed")
    module, _, attribute = builtin.where.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    return target_from(function, spec=builtin.name, name=builtin.name, origin=builtin.origin)


def _from_file(place: str, attribute: str) -> Callable[..., Any]:
    path = Path(place)
    if not path.is_file():
        raise UnknownTarget(f"no file {place!r}")
    name = f"attn_oracle_target_{abs(hash(path.resolve()))}"
    if name not in sys.modules:
        description = importlib.util.spec_from_file_location(name, path)
        if description is None or description.loader is None:
            raise UnknownTarget(f"{place!r} is no Python file")
        module = importlib.util.module_from_spec(description)
        sys.modules[name] = module
        # A kernel file may import its neighbours.
        sys.path.insert(0, str(path.resolve().parent))
        try:
            _loaded(lambda: description.loader.exec_module(module), place)  # type: ignore[union-attr]
        except BadTarget:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.resolve().parent))
    return _attribute(sys.modules[name], attribute, place)


def _from_module(place: str, attribute: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise UnknownTarget(f"no module {place!r}") from None
        raise Unavailable(f"{place} needs the module {error.name}, which is not installed") from None
    return _attribute(module, attribute, place)


def _attribute(module: Any, attribute: str, place: str) -> Callable[..., Any]:
    value = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise UnknownTarget(f"{place} has no {attribute!r}; it has: {public or 'no function'}")
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _loaded(load: Callable[[], Any], spec: str) -> Any:
    try:
        return load()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BadTarget(f"importing {spec} failed: {text}") from error
