"""Who sees what: explicit masks, and NaN behind them."""

import math

import torch
from torch import Tensor

from targets.honest.flash import Masks, Shape, Steps, compute_dtype, kernel
from targets.mutants.attention.inputs import EMPTY_ROW, ONE, TWO_KEYS, ZERO, heads, one_head, visible
from targets.mutants.mutant import mutant

LOWEST = torch.finfo(torch.float32).min


def add_lowest(tile: Tensor, seen: Masks) -> Tensor:
    for mask in seen:
        tile = torch.where(mask, tile, tile + LOWEST)
    return tile


mask_as_finfo_min = mutant(
    "attention",
    "P3",
    "Each mask adds the lowest finite float32: a row that may see nothing attends to what only one mask hides.",
    reports="Confirmed, in fp16 and with NaN as the result: huggingface/transformers#17306.",
    smallest=EMPTY_ROW,
)(kernel(Steps(exclude=add_lowest)))


def add_minus_1e4(tile: Tensor, seen: Masks) -> Tensor:
    for mask in seen:
        tile = torch.where(mask, tile, tile - 1e4)
    return tile


mask_minus_1e4 = mutant(
    "attention",
    "P2",
    "Hidden keys get -10000 added instead of being excluded: a larger score comes through.",
    smallest=one_head([[200.0]], [[0.0], [100.0]], [[1.0], [2.0]], attn_mask=visible(True, False)),
)(kernel(Steps(exclude=add_minus_1e4)))


def add_minus_inf(tile: Tensor, seen: Masks) -> Tensor:
    for mask in seen:
        tile = torch.where(mask, tile, tile - math.inf)
    return tile


mask_adds_minus_inf = mutant(
    "attention",
    "P2",
    "Hidden keys get -inf added instead of being excluded: a NaN score stays NaN.",
    reports="Reported: deepbeepmeep/Wan2GP#1628.",
    smallest=one_head(ONE, [[0.0], [math.nan]], [[1.0], [2.0]], attn_mask=visible(True, False)),
)(kernel(Steps(exclude=add_minus_inf)))


def product(p: Tensor, v: Tensor, seen: Masks) -> Tensor:
    wide = compute_dtype(v.dtype)
    return p.to(wide) @ v.to(wide)


masked_value_leaks = mutant(
    "attention",
    "P2",
    "The zero weight of a hidden key meets its NaN value, though the kernel declares that it blocks this.",
    reports="Confirmed: vllm-project/vllm#936. Reported: Dao-AILab/flash-attention#2374, pytorch/pytorch#101967.",
    smallest=one_head(ONE, [[0.0], [0.0]], [[1.0], [math.nan]], attn_mask=visible(True, False)),
)(kernel(Steps(weigh=product)))


def divide_if_positive(acc: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, acc / total, 0.0)


nan_swallowed = mutant(
    "attention",
    "P2",
    "The guard for empty rows asks whether the sum is positive, and turns a NaN row into zeros.",
    reports="Reported: pytorch/pytorch#141128.",
    smallest=one_head([[math.nan]], ZERO, ONE),
)(kernel(Steps(normalise=divide_if_positive)))


def inverted(mask: Tensor, shape: Shape) -> Tensor:
    return (~mask if mask.dtype == torch.bool else mask).expand(shape)


mask_inverted = mutant(
    "attention",
    "P4",
    "A boolean mask is read as True = hidden.",
    reports="Confirmed: lucidrains/x-transformers#160.",
    smallest=one_head(ZERO, *TWO_KEYS, attn_mask=visible(True, False)),
)(kernel(Steps(read_mask=inverted)))


def as_length(mask: Tensor, shape: Shape) -> Tensor:
    mask = mask.expand(shape)
    if mask.dtype != torch.bool:
        return mask
    return torch.arange(shape[-1]) < mask.sum(-1, keepdim=True)


mask_read_as_length = mutant(
    "attention",
    "P4",
    "A boolean mask is reduced to the number of visible keys, as if every mask were right padding.",
    reports="Confirmed: microsoft/onnxruntime#18945.",
    smallest=one_head(ZERO, [[0.0]] * 3, [[0.0], [0.0], [1.0]], attn_mask=visible(False, True, True)),
)(kernel(Steps(read_mask=as_length)))


def first_512(mask: Tensor, shape: Shape) -> Tensor:
    mask = mask.expand(shape)
    return mask | (torch.arange(shape[-1]) >= 512) if mask.dtype == torch.bool else mask


mask_ignored_beyond_512 = mutant(
    "attention",
    "P4",
    "A boolean mask is read for the first 512 keys only.",
    reports="Reported: vllm-project/vllm-ascend#15503.",
    smallest=one_head(ZERO, [[0.0]] * 513, [[0.0]] * 512 + [[512.0]], attn_mask=visible(*[True] * 512, False)),
)(kernel(Steps(read_mask=first_512)))


def of_head_zero(mask: Tensor, shape: Shape) -> Tensor:
    return mask.expand(shape)[:, :1].expand(shape)


mask_of_head_zero = mutant(
    "attention",
    "P13",
    "All heads use the mask of head 0.",
    smallest=heads(2, 2, mask=torch.eye(2, dtype=torch.bool).view(1, 2, 1, 2)),
)(kernel(Steps(read_mask=of_head_zero)))


def wrong_slice(mask: Tensor, shape: Shape) -> Tensor:
    batch, heads = shape[:2]
    if mask.dim() == 4 and mask.shape[0] == batch and mask.shape[1] == 1:
        slices = torch.arange(batch * heads).view(batch, heads) % batch
        mask = mask[:, 0][slices]
    return mask.expand(shape)


mask_offset_ignores_broadcast = mutant(
    "attention",
    "P4",
    "A mask `[B, 1, Sq, Sk]` is addressed as if it had one slice per head.",
    reports="Confirmed: pytorch/pytorch#184180.",
    smallest=heads(2, 2, batch=2, mask=torch.eye(2, dtype=torch.bool).view(2, 1, 1, 2)),
)(kernel(Steps(read_mask=wrong_slice)))
