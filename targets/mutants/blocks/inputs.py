"""Smallest inputs of whole blocks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from targets.mutants.mutant import Arguments, Builder, Row


def gqa_rows(x: Sequence[Row], *, heads: int = 1, kv_heads: int = 1, dim: int = 2, **weights: Any) -> Builder:
    """One sequence; W_Q, W_K, W_V and W_O are diagonals of ones, or 1, 2, 3, ... where ``weights`` name a number.

    The row at position j is turned by j right angles.
    """

    def build(dtype: torch.dtype) -> Arguments:
        rows, width = len(x), len(x[0])
        shapes = {"w_q": heads * dim, "w_k": kv_heads * dim, "w_v": kv_heads * dim}
        eyes = {n: torch.eye(size, width) for n, size in shapes.items()} | {"w_o": torch.eye(heads * dim)}
        counted = {n: torch.arange(1.0, eyes[n].numel() + 1).view_as(eyes[n]) * c for n, c in weights.items()}
        turns = torch.arange(rows)[:, None].expand(rows, dim // 2) * math.pi / 2
        tables = {"cos": turns.cos().round(), "sin": turns.sin().round()}
        tensors = {"x": torch.tensor([x]), **eyes, **counted, **tables}
        return {n: t.to(dtype) for n, t in tensors.items()} | {"num_heads": heads, "num_kv_heads": kv_heads}

    return build


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}


def mla_rows(x: Sequence[Row], *, start: int = 0, dim: int = 1, rotary: int = 2, **more: Any) -> Builder:
    """One sequence, one head: d_h = d_v = d_c = d_c' = E, all weights diagonals of ones; positions from ``start``."""

    def build(dtype: torch.dtype) -> Arguments:
        rows, width = len(x), len(x[0])
        one, turned = torch.eye(width), torch.eye(rotary, width)
        names = {"w_dkv": one, "w_uk": one[None, :dim], "w_uv": one[None], "w_kr": turned, "w_dq": one}
        names |= {"w_uq": one[None, :dim], "w_qr": turned[None], "w_o": one}
        tensors = {n: t.to(dtype) for n, t in {"x": torch.tensor([x]), **names}.items()}
        options = {n: v.to(dtype) if isinstance(v, Tensor) else v for n, v in more.items()}
        return {**tensors, "positions": torch.arange(start, start + rows), **options}

    return build
