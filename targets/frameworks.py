"""Bridges between numpy storage (bfloat16 through ml_dtypes) and the arrays that a target takes.

Each framework is imported when its bridge is first asked for. A new framework is one class and one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class Bridge(Protocol):
    def to_native(self, array: NDArray[Any], device: str) -> Any:
        """A fresh contiguous array of the framework with the same bits."""

    def to_numpy(self, value: Any) -> NDArray[Any]: ...

    def is_native(self, value: Any) -> bool: ...

    def synchronise(self, device: str) -> None: ...

    def shares_memory(self, result: Any, inputs: list[Any]) -> int | None:
        """Index of the first input whose memory a result shares, else None."""


@dataclass(frozen=True, slots=True)
class NumpyBridge:
    def to_native(self, array: NDArray[Any], device: str) -> Any:
        return np.array(array, copy=True, order="C")

    def to_numpy(self, value: Any) -> NDArray[Any]:
        return np.asarray(value)

    def is_native(self, value: Any) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def synchronise(self, device: str) -> None:
        return None

    def shares_memory(self, result: Any, inputs: list[Any]) -> int | None:
        results = result if isinstance(result, tuple | list) else [result]
        for index, given in enumerate(inputs):
            if any(isinstance(r, np.ndarray) and np.shares_memory(r, given) for r in results):
                return index
        return None


@dataclass(frozen=True, slots=True)
class TorchBridge:
    torch: Any

    def to_native(self, array: NDArray[Any], device: str) -> Any:
        array = np.array(array, copy=True, order="C")
        if array.dtype == np.dtype(ml_dtypes.bfloat16):
            tensor = self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        else:
            tensor = self.torch.from_numpy(array)
        return tensor.to(device) if device != "cpu" else tensor

    def to_numpy(self, value: Any) -> NDArray[Any]:
        value = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        if value.dtype == self.torch.bfloat16:
            return np.asarray(value.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(value.numpy())

    def is_native(self, value: Any) -> bool:
        return isinstance(value, self.torch.Tensor)

    def synchronise(self, device: str) -> None:
        if device.startswith("cuda"):
            self.torch.cuda.synchronize()

    def shares_memory(self, result: Any, inputs: list[Any]) -> int | None:
        results = result if isinstance(result, tuple | list) else [result]
        owned = [r.untyped_storage().data_ptr() for r in results if self.is_native(r) and r.numel()]
        for index, given in enumerate(inputs):
            if given.numel() and given.untyped_storage().data_ptr() in owned:
                return index
        return None


def bridge(framework: str) -> Bridge:
    """The bridge called ``framework``; ValueError lists the known ones."""
    if framework == "numpy":
        return NumpyBridge()
    if framework == "torch":
        import torch

        return TorchBridge(torch)
    raise ValueError(f"unknown framework {framework!r}; known: numpy, torch")
