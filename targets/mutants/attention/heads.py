"""A head reads what belongs to another: KV heads, and splits that follow the batch."""

from typing import Any

import torch
from torch import Tensor

from targets.honest.describe import describe
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import heads
from targets.mutants.mutant import mutant


def tiled(query_heads: int, kv_heads: int) -> Tensor:
    return torch.arange(query_heads) % kv_heads


gqa_tiled = mutant(
    "attention",
    "P13",
    "KV heads are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1).",
    reports="Reported: onnx/onnx#7274.",
    smallest=heads(4, 2),
)(kernel(Steps(kv_head=tiled)))


def wrong_group(query_heads: int, kv_heads: int) -> Tensor:
    heads = torch.arange(query_heads)
    return heads if query_heads == kv_heads else heads // kv_heads % kv_heads


gqa_group_is_kv_heads = mutant(
    "attention",
    "P13",
    "The number of KV heads is used as the size of a group: right when the two are equal.",
    reports="Confirmed: HazyResearch/HipKittens#22.",
    smallest=heads(6, 2),
)(kernel(Steps(kv_head=wrong_group)))


KERNELS = {n: kernel(Steps(splits=n)) for n in (1, 2)}


@mutant(
    "attention",
    "P11",
    "The number of splits follows the batch, though batch invariance is declared.",
    reports="Reported: deepseek-ai/FlashMLA#212.",
    smallest="two sequences, and each of them alone",
)
@describe("attention", contract={"preset": "flash", "splits": 2}, conventions={"batch_invariant": "yes"})
def splits_follow_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    kernel = KERNELS[2 if len(q) == 1 else 1]
    return kernel(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
