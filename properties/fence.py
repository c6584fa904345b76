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
from properties.bench import Bench
from targets import frameworks
from targets.base import Observed, run

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


def fenced_call(bench: Bench, case: Case) -> tuple[Observed, str]:
    """One call of the target with fenced inputs, and which of its arguments had the memory next to it written."""
    bridge = frameworks.bridge(bench.target.framework)
    trespassed: list[str] = []

    def fenced(*positional: Any, **keyword: Any) -> Any:
        named = {**{f"number {i + 1}": value for i, value in enumerate(positional)}, **keyword}
        fences = {
            name: _Fence(bridge, bridge.to_numpy(value), bench.device)
            for name, value in named.items()
            if _fits(bridge, value)
        }
        inside = {name: fences[name].inside if name in fences else value for name, value in named.items()}
        first = [inside.pop(f"number {i + 1}") for i in range(len(positional))]
        result = bench.target.function(*first, **inside)
        bridge.synchronise(bench.device)
        trespassed.extend(name for name, fence in fences.items() if not fence.intact())
        return result

    observed = run(replace(bench.target, function=fenced), case, device=bench.device, seconds=bench.seconds)
    return observed, ", ".join(trespassed)


def _fits(bridge: frameworks.Bridge, value: Any) -> bool:
    # A boolean has no value that no mask holds.
    return bridge.is_native(value) and bridge.to_numpy(value).dtype != np.bool_
