"""Inputs as views of other memory: transposed, strided, offset, expanded, and farther apart than 32 bits can count.

The target is called through a wrapper that lays each array of the case anew; what lies between its elements is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.formats import StoredArray
from properties.subject import Subject
from targets.calling import frameworks
from targets.calling.target import Observed, run

Bridge = frameworks.Bridge[Any]
Lay = Callable[[Bridge, StoredArray, str], object]
"""(bridge, array, device) -> the framework's view that holds the array's numbers."""


@dataclass(frozen=True, slots=True)
class View:
    """One way to lay an array. names: which arguments are laid so (None: all arrays); the others are contiguous."""

    what: str
    lay: Lay
    names: frozenset[str] | None = None


def _gaps(shape: tuple[int, ...], like: StoredArray) -> StoredArray:
    """An array of NaN, of the lowest number or of False where the dtype has none."""
    filled = np.zeros(shape, dtype=like.dtype)
    if like.dtype != np.bool_:
        filled.view(np.uint8).fill(0xFF)
    return filled


def swapped(first: int, second: int) -> Lay:
    """Two axes exchanged in memory."""

    def lay(bridge: Bridge, array: StoredArray, device: str) -> object:
        if array.ndim <= max(first, second):
            return bridge.to_native(array, device)
        return bridge.to_native(np.ascontiguousarray(array.swapaxes(first, second)), device).swapaxes(first, second)

    return lay


def widened(bridge: Bridge, array: StoredArray, device: str) -> object:
    """The middle third of wider rows, as q, k or v of a fused projection."""
    width = array.shape[-1]
    buffer = _gaps((*array.shape[:-1], 3 * width), array)
    buffer[..., width : 2 * width] = array
    return bridge.to_native(buffer, device)[..., width : 2 * width]


def every_other(axis: int) -> Lay:
    """Every second place along an axis."""

    def lay(bridge: Bridge, array: StoredArray, device: str) -> object:
        if array.ndim <= axis:
            return bridge.to_native(array, device)
        index = (slice(None),) * axis + (slice(None, None, 2),)
        buffer = _gaps((*array.shape[:axis], 2 * array.shape[axis], *array.shape[axis + 1 :]), array)
        buffer[index] = array
        return bridge.to_native(buffer, device)[index]

    return lay


def offset(bridge: Bridge, array: StoredArray, device: str) -> object:
    """Contiguous, from the second element of its memory on."""
    buffer = np.concatenate([_gaps((1,), array), array.reshape(-1), _gaps((1,), array)])
    return bridge.to_native(buffer, device)[1 : 1 + array.size].reshape(array.shape)


def expanded(axis: int) -> Lay:
    """One entry along an axis, of which all are alike, with stride 0; as it is where they are not."""

    def lay(bridge: Bridge, array: StoredArray, device: str) -> object:
        if array.ndim <= axis or array.shape[axis] < 2:
            return bridge.to_native(array, device)
        first = array.take([0], axis=axis)
        if not np.array_equal(np.broadcast_to(first, array.shape), array):
            return bridge.to_native(array, device)
        return bridge.expand(bridge.to_native(first, device), array.shape)

    return lay


def far_apart(axis: int) -> Lay:
    """So far apart along an axis that the last element's number exceeds 2^31. MemoryError where there is no room.

    The memory between is never touched, so that on a CPU it costs addresses alone.
    """

    def lay(bridge: Bridge, array: StoredArray, device: str) -> object:
        count = array.shape[axis]
        step = -(-(2**31) // (count - 1)) + 64
        strides = [int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)]
        inside = strides[axis] * count
        if any(array.shape[i] > 1 and strides[i] >= inside for i in range(axis)):
            raise ValueError(f"axes before {axis} must have length 1, got shape {list(array.shape)}")
        strides[axis] = step
        return bridge.spread(array, tuple(strides), device)

    return lay


def viewed_call(subject: Subject, case: Case, view: View) -> Observed:
    """One call of the target with its arrays laid as ``view`` says, options that are arrays included."""
    bridge = frameworks.bridge(subject.target.framework)
    own = {name if own is None else own: name for name, own in subject.target.parameters.items()}
    order = [name for name, kept in subject.target.parameters.items() if kept is None]

    def laid(*positional: object, **keyword: object) -> object:
        first = [
            _laid(bridge, view, name, value, subject.device) for name, value in zip(order, positional, strict=False)
        ]
        rest = {key: _laid(bridge, view, own.get(key, key), value, subject.device) for key, value in keyword.items()}
        return subject.target.function(*first, *positional[len(first) :], **rest)

    return run(replace(subject.target, function=laid), case, device=subject.device, seconds=subject.seconds)


def _laid(bridge: Bridge, view: View, name: str, value: object, device: str) -> object:
    if not bridge.is_native(value) or (view.names is not None and name not in view.names):
        return value
    return view.lay(bridge, bridge.to_numpy(value), device)


def only(views: Mapping[str, Lay], *names: str) -> list[View]:
    """Views of some arguments."""
    return [View(what, lay, frozenset(names)) for what, lay in views.items()]
