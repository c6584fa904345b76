"""Smallest inputs of softmax."""

from typing import Any

import torch

from targets.mutants.mutant import Builder


def entries(x: Any) -> Builder:
    return lambda dtype: {"x": torch.tensor(x, dtype=dtype)}
