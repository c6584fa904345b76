"""Bridges between numpy storage (bfloat16 through ml_dtypes) and the arrays that a target takes.

Each framework is imported when its bridge is first asked for. A new framework is one class and one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import ml_dtypes
import numpy as np

from oracle.formats import StoredArray

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A")
"""The arrays of one framework."""
FRAMEWORKS = ("torch", "numpy")
# Dtypes that numpy has through ml_dtypes only; torch calls them by the same names.
_FOREIGN = {np.dtype(t).name: t for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
_NAMES = {np.dtype(t): name for name, t in _FOREIGN.items()}


class Bridge(Protocol[A]):
    """How the arrays of one framework are made and read."""

    def adopt(self, array: StoredArray) -> A:
        """The framework's view of a numpy array's own memory, on the CPU."""

    def to_native(self, array: StoredArray, device: str) -> A:
        """A fresh contiguous array of the framework with the same bits."""

    def to_numpy(self, value: A) -> StoredArray:
        """The value's bits in numpy storage. TypeError for a dtype that has none."""

    def is_native(self, value: object) -> TypeGuard[A]:
        """Whether the value is an array of the framework."""

    def expand(self, value: A, shape: tuple[int, ...]) -> A:
        """A view of this shape in which axes of length 1 are repeated with stride 0."""

    def spread(self, array: StoredArray, strides: tuple[int, ...], device: str) -> A:
        """The array at these strides, in elements; memory between is not touched. MemoryError without room."""

    def synchronise(self, device: str) -> None:
        """Wait until the device has done what it was asked to do."""

    def shares_memory(self, result: object, inputs: Sequence[A]) -> int | None:
        """Index of the first input whose memory a result shares, else None."""


def _results(result: object) -> list[object]:
    if isinstance(result, Mapping):
        return list(result.values())
    return list(result) if isinstance(result, tuple | list) else [result]


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements a view of this shape and these strides reaches over."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class NumpyBridge:
    def adopt(self, array: StoredArray) -> StoredArray:
        return array

    def to_native(self, array: StoredArray, device: str) -> StoredArray:
        return np.array(array, copy=True, order="C")

    def to_numpy(self, value: StoredArray) -> StoredArray:
        return np.asarray(value)

    def is_native(self, value: object) -> TypeGuard[StoredArray]:
        return isinstance(value, np.ndarray | np.generic)

    def expand(self, value: StoredArray, shape: tuple[int, ...]) -> StoredArray:
        return np.broadcast_to(value, shape)

    def spread(self, array: StoredArray, strides: tuple[int, ...], device: str) -> StoredArray:
        buffer = np.empty(_extent(array.shape, strides), dtype=array.dtype)
        view = np.lib.stride_tricks.as_strided(buffer, array.shape, [s * buffer.itemsize for s in strides])
        view[...] = array
        return view

    def synchronise(self, device: str) -> None:
        return None

    def shares_memory(self, result: object, inputs: Sequence[StoredArray]) -> int | None:
        for index, given in enumerate(inputs):
            if any(isinstance(r, np.ndarray) and np.may_share_memory(r, given) for r in _results(result)):
                return index
        return None


@dataclass(frozen=True, slots=True)
class TorchBridge:
    torch: ModuleType

    def adopt(self, array: StoredArray) -> Tensor:
        foreign = _NAMES.get(array.dtype)
        bits = array if foreign is None else array.view(np.int16 if array.dtype.itemsize == 2 else np.int8)
        tensor: Tensor = self.torch.from_numpy(bits)
        return tensor if foreign is None else tensor.view(getattr(self.torch, foreign))

    def to_native(self, array: StoredArray, device: str) -> Tensor:
        tensor = self.adopt(np.array(array, copy=True, order="C"))
        return tensor.to(device) if device != "cpu" else tensor

    def to_numpy(self, value: Tensor) -> StoredArray:
        value = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        name = str(value.dtype).removeprefix("torch.")
        if name in _FOREIGN:
            bits = self.torch.int16 if value.element_size() == 2 else self.torch.int8
            return np.asarray(value.view(bits).numpy().view(_FOREIGN[name]))
        return np.asarray(value.numpy())

    def is_native(self, value: object) -> TypeGuard[Tensor]:
        return isinstance(value, self.torch.Tensor)

    def expand(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        return value.expand(shape)

    def spread(self, array: StoredArray, strides: tuple[int, ...], device: str) -> Tensor:
        source = self.to_native(array, device)
        try:
            buffer: Tensor = self.torch.empty(_extent(array.shape, strides), dtype=source.dtype, device=device)
        except RuntimeError as error:
            raise MemoryError(f"no room for {_extent(array.shape, strides)} elements") from error
        return buffer.as_strided(array.shape, strides).copy_(source)

    def synchronise(self, device: str) -> None:
        if device.startswith("cuda"):
            self.torch.cuda.synchronize()

    def shares_memory(self, result: object, inputs: Sequence[Tensor]) -> int | None:
        owned = [r.untyped_storage().data_ptr() for r in _results(result) if self.is_native(r) and r.numel()]
        for index, given in enumerate(inputs):
            if given.numel() and given.untyped_storage().data_ptr() in owned:
                return index
        return None


class GuardBytes:
    """An array ``inside`` a larger buffer of its framework, on any device, whose borders are NaN, or -1 where the dtype
    has none: a kernel that runs past the end neither crashes nor stays unseen. `intact`: the borders still stand."""

    # What kernels align their loads to, and more than a row of most heads.
    WIDTH = 256

    def __init__(self, bridge: Bridge[Any], array: StoredArray, device: str) -> None:
        border = np.full(self.WIDTH, 0xFF, dtype=np.uint8).view(array.dtype)
        self._bridge, self._border = bridge, border
        self._buffer = bridge.to_native(np.concatenate([border, array.reshape(-1), border]), device)
        self.inside = self._buffer[len(border) : len(border) + array.size].reshape(array.shape)

    def intact(self) -> bool:
        now, width = self._bridge.to_numpy(self._buffer), len(self._border)
        return all(side.tobytes() == self._border.tobytes() for side in (now[:width], now[-width:]))


def bridge(framework: str) -> Bridge[Any]:
    """The bridge called ``framework``; ValueError lists the known ones."""
    if framework == "numpy":
        return NumpyBridge()
    if framework == "torch":
        import torch

        return TorchBridge(torch)
    raise ValueError(f"unknown framework {framework!r}; known: {', '.join(FRAMEWORKS)}")
