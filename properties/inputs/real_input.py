"""Real attention inputs: q, k, v that a trained model's layers read, recorded in `properties/data/smollm2`.

Random tensors have neither attention sinks nor the rotary structure of trained keys, and a kernel that passed
on them has failed on captured ones (tenstorrent/tt-metal#21199). `properties/data/README.md` tells what was recorded
and how; this module reads it with numpy alone and hands out nothing that does not match the recorded hashes,
names, shapes and dtypes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

# Beside this package in the checkout and in site-packages alike.
STORE = Path(__file__).resolve().parent.parent / "data" / "smollm2"
SCHEMA = 1


class DamagedCaptureError(ValueError):
    """A stored file is missing or is not what its provenance says; the message is one line with its path."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """One layer's attention inputs, float32 and read-only, at positions 0..S-1.

    q_pre, q [Hq, S, D]: queries before and after RoPE. k_pre, k [Hkv, S, D]: keys likewise. v [Hkv, S, D]:
    values. Attention is causal with scale 1/sqrt(D); query head h reads KV head h // (Hq / Hkv). rope_base,
    rope_layout: the rotation (no scaling, all D entries) that leads from q_pre, k_pre to q, k within float32
    rounding. layer: its index in the model. sink_mass [Hq]: each head's mean weight on token 0 over the rows
    1..S-1.
    """

    name: str
    q_pre: NDArray[np.float32]
    k_pre: NDArray[np.float32]
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    rope_base: float
    rope_layout: str
    layer: int
    sink_mass: tuple[float, ...]


def captured_layers(*, store: Path = STORE) -> tuple[str, ...]:
    """Names of the stored layers, in the model's order. Raises DamagedCaptureError."""
    return tuple(_provenance(store)["layers"])


def load_layer(name: str, *, store: Path = STORE) -> CapturedLayer:
    """The stored layer `name`. DamagedCaptureError, or ValueError that lists the names for an unknown one."""
    provenance = _provenance(store)
    if name not in provenance["layers"]:
        raise ValueError(f"no captured layer {name!r}; there are: {', '.join(provenance['layers'])}")
    facts = provenance["layers"][name]
    try:
        tensors = _tensors(store / facts["file"], facts, provenance["text"]["tokens"])
        return CapturedLayer(
            name=name,
            **tensors,
            rope_base=float(provenance["rope"]["base"]),
            rope_layout=str(provenance["rope"]["layout"]),
            layer=int(facts["layer"]),
            sink_mass=tuple(float(mass) for mass in facts["sink_mass"]),
        )
    except (KeyError, TypeError) as error:
        raise DamagedCaptureError(f"{store / 'provenance.json'}: layer {name} lacks {error}") from error


def _provenance(store: Path) -> dict[str, Any]:
    path = store / "provenance.json"
    content = _read(path)
    try:
        provenance = json.loads(content)
    except ValueError as error:
        raise DamagedCaptureError(f"{path}: not JSON: {error}") from error
    if not isinstance(provenance, dict) or provenance.get("schema") != SCHEMA:
        raise DamagedCaptureError(f"{path}: schema {SCHEMA} expected")
    if not isinstance(provenance.get("layers"), dict):
        raise DamagedCaptureError(f"{path}: no layers")
    return provenance


def _tensors(path: Path, facts: dict[str, Any], length: int) -> dict[str, NDArray[np.float32]]:
    content = _read(path)
    found = hashlib.sha256(content).hexdigest()
    if found != facts["sha256"]:
        raise DamagedCaptureError(f"{path}: sha256 {found[:12]}.. where provenance.json has {facts['sha256'][:12]}..")
    try:
        tensors = load_safetensors(content)
    except SafetensorError as error:
        raise DamagedCaptureError(f"{path}: not safetensors: {error}") from error
    query, key = ((facts[heads], length, facts["head_dim"]) for heads in ("query_heads", "kv_heads"))
    expected = {"q_pre": query, "k_pre": key, "q": query, "k": key, "v": key}
    shapes = {name: array.shape for name, array in tensors.items()}
    if shapes != expected:
        raise DamagedCaptureError(f"{path}: tensors {shapes}, expected {expected}")
    for name, array in tensors.items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise DamagedCaptureError(f"{path}: {name} is {array.dtype}, finite float32 expected")
        array.flags.writeable = False  # a target that writes to its input must not change the next test's
    return tensors


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCaptureError(f"{path}: {error.strerror}; restore it or run `tox -e capture`") from error
