"""Smallest inputs of the rotary embedding: one token."""

from typing import Any

import torch

from oracle.ops.rope.parameters import RopeParameters
from targets.mutants.mutant import Arguments, Builder, Row


def one_token(x: Row, position: int, **more: Any) -> Builder:
    """One token."""
    return lambda dtype: {
        "x": torch.tensor([[[x]]], dtype=dtype),
        "positions": torch.tensor([position]),
        **more,
    }


def by_axis(x: Row, scaling: RopeParameters) -> Builder:
    """One token at time 0, height 1, width 2."""
    positions = torch.tensor([[0], [1], [2]])
    return lambda dtype: {"x": torch.tensor([[[x]]], dtype=dtype), "positions": positions, "scaling": scaling}


def two_sequences(dtype: torch.dtype) -> Arguments:
    return {"x": torch.ones(2, 1, 1, 2, dtype=dtype), "positions": torch.tensor([[0], [1]])}


def two_entries(dtype: torch.dtype) -> Arguments:
    tables = {"cos": torch.tensor([[241 / 256]], dtype=dtype), "sin": torch.tensor([[0.0]], dtype=dtype)}
    return {"x": torch.tensor([[[[137 / 128, 0.0]]]], dtype=dtype), **tables}


def yarn(**more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}


PARTIAL = one_token([1.0] * 8, 1, rotary_dim=4)
YARN = one_token([1.0, 1.0], 0, scaling=yarn())

LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.0,
    "short_factor": [1.0], "long_factor": [2.0],
}  # fmt: skip
