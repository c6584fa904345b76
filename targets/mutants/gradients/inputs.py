"""Smallest inputs of backward passes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from targets.mutants.mla.inputs import latents as forward
from targets.mutants.mutant import Arguments, Builder, Row


def one_head(
    q: Sequence[Row], k: Sequence[Row], v: Sequence[Row], do: Sequence[Row], *, scale: float | None = 1.0, **more: Any
) -> Builder:
    """One head from the rows of q `[Sq, D]`, k `[Sk, D]`, v `[Sk, Dv]`, do `[Sq, Dv]`."""

    def build(dtype: torch.dtype) -> Arguments:
        rows = {"q": q, "k": k, "v": v, "do": do}
        given = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in more.items()}
        return {**{n: torch.tensor([[r]], dtype=dtype) for n, r in rows.items()}, "scale": scale, **given}

    return build


def grouped_backward(dtype: torch.dtype) -> Arguments:
    """Two query heads that share a KV head."""
    q, do = torch.ones(1, 2, 1, 1, dtype=dtype), torch.ones(1, 2, 1, 1, dtype=dtype)
    k = torch.tensor([[[[0.0], [0.0]]]], dtype=dtype)
    return {"q": q, "k": k, "v": torch.tensor([[[[0.0], [1.0]]]], dtype=dtype), "do": do, "scale": 1.0}


TWO_KEYS = ([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[1.0]])


def latents(*cotangents: float, keys: int = 1) -> Builder:
    """Latent attention with one query, and one cotangent a head."""

    def build(dtype: torch.dtype) -> Arguments:
        given = forward(len(cotangents), keys)(dtype)
        given.pop("return_lse")
        return {**given, "do": torch.tensor(cotangents, dtype=dtype).view(1, -1, 1, 1)}

    return build


def one_token(dy: Row, position: int, **more: Any) -> Builder:
    """One token and its cotangent."""
    return lambda dtype: {"dy": torch.tensor([[[dy]]], dtype=dtype), "positions": torch.tensor([position]), **more}


def entries_and_cotangents(y: Any, dy: Any) -> Builder:
    return lambda dtype: {"y": torch.tensor(y, dtype=dtype), "dy": torch.tensor(dy, dtype=dtype)}
