"""Does a target write, or let itself be led by, memory next to its inputs? Asked on any device.

Every array that the target is given lies in the middle of a larger buffer of its framework, so that a kernel that runs
past the end of an array neither crashes nor stays unseen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from properties.subject import Subject
from targets.calling import frameworks
from targets.calling.target import Observed, run

# Bytes on either side: what kernels align their loads to, and more than a row of most heads.
WIDTH = 256


class _Fence:
    """One array inside a buffer whose borders are NaN, or -1 where the dtype has none."""

    def __init__(self, bridge: frameworks.Bridge, array: NDArray[Any], device: str) -> None:
        border = np.full(WIDTH, 0xFF, dtype=np.uint8).view(array.dtype)
        self._bridge, self._border = bridge, border
        buffer = np.concatenate([border, array.reshape(-1), border])
        self._buffer = bridge.to_native(buffer, device)
        self.inside = self._buffer[len(border) : len(border) + array.size].reshape(array.shape)

    def intact(self) -> bool:
        now, width = self._bridge.to_numpy(self._buffer), len(self._border)
        return all(side.tobytes() == self._border.tobytes() for side in (now[:width], now[-width:]))


def guarded_call(subject: Subject, case: Case) -> tuple[Observed, str]:
    """One call of the target with guarded inputs, and which of its arguments had the memory next to it written."""
    bridge = frameworks.bridge(subject.target.framework)
    trespassed: list[str] = []

    def guarded(*positional: Any, **keyword: Any) -> Any:
        named = {**{f"number {i + 1}": value for i, value in enumerate(positional)}, **keyword}
        guards = {
            name: _Fence(bridge, bridge.to_numpy(value), subject.device)
            for name, value in named.items()
            if _fits(bridge, value)
        }
        inside = {name: guards[name].inside if name in guards else value for name, value in named.items()}
        first = [inside.pop(f"number {i + 1}") for i in range(len(positional))]
        result = subject.target.function(*first, **inside)
        bridge.synchronise(subject.device)
        trespassed.extend(name for name, guard in guards.items() if not guard.intact())
        return result

    observed = run(replace(subject.target, function=guarded), case, device=subject.device, seconds=subject.seconds)
    return observed, ", ".join(trespassed)


def _fits(bridge: frameworks.Bridge, value: Any) -> bool:
    # A boolean has no value that no mask holds.
    return bridge.is_native(value) and bridge.to_numpy(value).dtype != np.bool_
