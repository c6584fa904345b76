"""A case: the exact input of one call of one op, with a hash and a lossless file form.

On disk a case is two files: ``<stem>.safetensors`` with the arrays and ``<stem>.json``
with op, options and provenance. The round trip is bit-exact, NaN payloads included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oracle.formats import StoredArray

SCHEMA = 1
# numpy and safetensors' numpy reader have no such dtypes of their own, so their bits travel as integers and the JSON
# names them.
_FOREIGN = {np.dtype(t).name: np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
# What reading a file that is no case can raise: from the file system, json, float.fromhex, safetensors, and lookups in
# a document of another form.
_UNREADABLE = (
    OSError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    SafetensorError,
)


class DamagedCase(ValueError):
    """A case file that cannot be read back; the message is one line and names the file."""


@dataclass(frozen=True, slots=True)
class Case:
    """Op, arrays by canonical argument name, options by canonical keyword. Inputs are exact as stored."""

    op: str
    arrays: Mapping[str, NDArray[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    _identity: str = field(default="", init=False, repr=False, compare=False)

    def with_arrays(self, **arrays: StoredArray) -> Case:
        return replace(self, arrays={**self.arrays, **arrays})

    def with_options(self, **options: object) -> Case:
        return replace(self, options={**self.options, **options})

    def without_options(self, *names: str) -> Case:
        return replace(self, options={k: v for k, v in self.options.items() if k not in names})

    def digest(self) -> str:
        """Sixteen hex digits that identify op, options and every bit of the arrays."""
        return self.identity()[:16]

    def identity(self) -> str:
        """All 64 digits of which `digest` is the beginning; worked out once: nobody may change a case's arrays."""
        if not self._identity:
            object.__setattr__(self, "_identity", self._hashed())
        return self._identity

    def _hashed(self) -> str:
        h = hashlib.sha256()
        h.update(json.dumps([self.op, _options_to_json(self.options)], sort_keys=True).encode())
        for name in sorted(self.arrays):
            array = self.arrays[name]
            h.update(f"{name}{array.dtype}{array.shape}".encode())
            h.update(array.tobytes())
        return h.hexdigest()

    def describe(self) -> str:
        """One line: shapes, dtypes and options."""
        arrays = ", ".join(f"{n}{list(a.shape)} {a.dtype}" for n, a in self.arrays.items())
        plain = {k: v for k, v in self.options.items() if not isinstance(v, np.ndarray)}
        held = {k: f"array{list(v.shape)} {v.dtype}" for k, v in self.options.items() if isinstance(v, np.ndarray)}
        options = ", ".join(f"{k}={v}" for k, v in {**plain, **held}.items())
        return f"{self.op}({arrays}{'; ' + options if options else ''})"


def _options_to_json(options: Mapping[str, object]) -> dict[str, object]:
    # Array-valued options (attn_mask) are named here and stored beside the arrays.
    return {key: _option_to_json(value) for key, value in options.items()}


def _option_to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return {"array": str(value.dtype), "shape": list(value.shape), "sha": content}
    plain = value.item() if isinstance(value, np.generic) else value
    return {"hex": plain.hex()} if isinstance(plain, float) else plain


def _files(stem: Path) -> tuple[Path, Path]:
    # Not with_suffix: a stem may hold dots ("scale-0.5").
    return stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")


def save_case(case: Case, stem: Path, *, note: Mapping[str, object] | None = None) -> tuple[Path, Path]:
    """Write ``stem.safetensors`` and ``stem.json``; returns both paths. ``note`` is free provenance."""
    held = {f"options/{k}": v for k, v in case.options.items() if isinstance(v, np.ndarray)}
    tensors = {**{f"arrays/{k}": v for k, v in case.arrays.items()}, **held}
    dtypes = {name: str(array.dtype) for name, array in tensors.items()}
    packed = {n: _packed(a) for n, a in tensors.items()}
    stem.parent.mkdir(parents=True, exist_ok=True)
    data, meta = _files(stem)
    save_file(packed, data)
    document = {
        "schema": SCHEMA,
        "op": case.op,
        "options": _options_to_json(case.options),
        "dtypes": dtypes,
        "digest": case.digest(),
        "note": dict(note or {}),
    }
    partial = meta.with_suffix(".json.part")
    partial.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    os.replace(partial, meta)
    return data, meta


def _packed(array: StoredArray) -> StoredArray:
    # A plain copy in C order: ascontiguousarray would make [1] of a scalar array.
    bits = np.uint16 if array.dtype.itemsize == 2 else np.uint8
    return np.array(array.view(bits) if array.dtype.name in _FOREIGN else array, order="C")


def load_case(path: Path) -> Case:
    """Read a case back from either of its two files. DamagedCase, in one line, if anything does not fit."""
    data, meta = _files(path.with_suffix("") if path.suffix in (".json", ".safetensors") else path)
    try:
        document = json.loads(meta.read_text())
        tensors: dict[str, StoredArray] = {}
        with safe_open(data, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict, and not iterable
                raw = file.get_tensor(name)
                stored = document["dtypes"][name]
                tensors[name] = raw.view(_FOREIGN[stored]) if stored in _FOREIGN else raw
        options: dict[str, object] = {}
        for key, value in document["options"].items():
            if isinstance(value, dict) and "array" in value:
                options[key] = tensors[f"options/{key}"]
            elif isinstance(value, dict) and "hex" in value:
                options[key] = float.fromhex(value["hex"])
            else:
                options[key] = tuple(value) if isinstance(value, list) else value
        arrays = {n.removeprefix("arrays/"): a for n, a in tensors.items() if n.startswith("arrays/")}
        case = Case(document["op"], arrays, options)
        intact = case.digest() == document["digest"]
    except _UNREADABLE as fault:
        message = f"cannot read case {path}: {type(fault).__name__}: {fault}"
        raise DamagedCase(message.replace("\n", " ")) from fault
    if not intact:
        raise DamagedCase(f"cannot read case {path}: the arrays do not match the stored digest")
    return case
