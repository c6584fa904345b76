"""What a function may declare about itself in ``__attn_oracle__``, and everything that can be wrong with that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from oracle.contract.contract import UnknownContract
from oracle.ops.contracts import declared_forms
from oracle.ops.table import op_named, ops
from targets.calling.frameworks import FRAMEWORKS

METADATA = (
    "op",
    "name",
    "dtypes",
    "devices",
    "contract",
    "conventions",
    "framework",
    "description",
    "requires",
    "counterpart",
    "interpreted",
    "gradients",
)
DEVICES = ("cpu", "cuda")


def metadata(function: Callable[..., Any]) -> Any:
    """``__attn_oracle__`` of the function, or of the one inside a partial or a wrapper; an empty dict without any."""
    while not hasattr(function, "__attn_oracle__"):
        inner = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
        if inner is None:
            return {}
        function = inner
    return getattr(function, "__attn_oracle__")  # noqa: B009 - not an attribute that mypy knows


def problems(meta: object, op: str) -> list[str]:
    """Everything that is wrong with a target's metadata, each in one line that names the key and the valid values."""
    if not isinstance(meta, Mapping):
        return [f"__attn_oracle__ is {type(meta).__name__}, not a dict"]
    found = [f"unknown metadata key {key!r}; known: {', '.join(METADATA)}" for key in meta if key not in METADATA]
    if meta.get("op", op) in tuple(ops()):
        formats = op_named(meta.get("op", op)).formats
    else:
        found.append(f"unknown op {meta['op']!r}; known: {', '.join(ops())}")
        formats = op_named(op).formats
    for key, known in (("dtypes", formats), ("devices", DEVICES)):
        found += _wrong_names(key, meta.get(key, known), known)
    if meta.get("framework", "torch") not in FRAMEWORKS:
        found.append(f"unknown framework {meta['framework']!r}; known: {', '.join(FRAMEWORKS)}")
    conventions = meta.get("conventions", {})
    if isinstance(conventions, Mapping):
        found += [wrong for name, value in conventions.items() if (wrong := wrong_convention(op, name, value))]
    else:
        found.append(f"conventions is {type(conventions).__name__}, not a dict")
    if meta.get("contract") is not None:
        found += _wrong_contract(meta["contract"], op)
    found += [
        f"{key} is {type(meta[key]).__name__}, not a string"
        for key in ("name", "description", "counterpart")
        if not isinstance(meta.get(key, ""), str | None)
    ]
    return found


def wrong_convention(op: str, name: str, value: object) -> str:
    """What is wrong with stating ``name`` = ``value``, in one line that lists the valid ones; empty if nothing is.

    A convention is a published choice, never a failure; contradicting the stated one is. `grouped_heads` and
    `unequal_value_dim` are limits.
    """
    known = op_named(op).conventions
    if name not in known:
        return f"unknown convention {name!r} for {op}; known: {', '.join(known) or 'none'}"
    if value not in known[name]:
        return f"unknown value {value!r} of convention {name}; known: {', '.join(known[name])}"
    return ""


def _wrong_names(key: str, value: object, known: tuple[str, ...]) -> list[str]:
    if not isinstance(value, tuple | list) or not value:
        return [f"{key} must be a tuple of names out of {', '.join(known)}; got {value!r}"]
    return [f"unknown name {name!r} in {key}; known: {', '.join(known)}" for name in value if name not in known]


def _wrong_contract(contract: object, op: str) -> list[str]:
    if not isinstance(contract, str | Mapping):
        return [f"contract is {type(contract).__name__}; it is a preset name or a dict of fields"]
    try:
        declared_forms(op, contract if isinstance(contract, str) else dict(contract), "fp32")
    except UnknownContract as error:
        return [str(error)]
    return []
