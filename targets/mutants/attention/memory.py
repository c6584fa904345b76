"""Strides, offsets and side effects: whose memory is read and written."""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.mutants.mutant import mutant


@mutant(
    "attention",
    "P15",
    "The scaled query is written back into the caller's tensor.",
    reports="Reported: unslothai/unsloth#5001.",
    smallest="any; the result is right, the input is not what it was",
)
def query_scaled_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    result = flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
    if q.is_contiguous():
        with torch.no_grad():
            q.mul_(flash.scale_of(scale, q.shape[-1]))
    return result


def zero_the_tail(k: Tensor) -> None:
    """Never beyond the storage: a crash would prove nothing."""
    end = k.storage_offset() + k.numel()
    room = k.untyped_storage().nbytes() // k.element_size() - end
    behind = min(room, -k.shape[-2] % flash.TILE * k.shape[-1])
    if k.is_contiguous() and behind > 0:
        with torch.no_grad():
            k.as_strided((behind,), (1,), end).zero_()


@mutant(
    "attention",
    "P15",
    "The tail of the last tile of K is zeroed in place, in memory behind the tensor: somebody else's.",
    reports="Reported, for an append into a full cache: Dao-AILab/flash-attention#638.",
    smallest="one key that is the first of two rows of a buffer",
)
def pads_past_the_end(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    zero_the_tail(k)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def as_if_contiguous(t: Tensor) -> Tensor:
    """The memory from the tensor's first element on, in its shape."""
    strides = torch.empty(t.shape, device="meta").stride()
    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))
    return t if flat.numel() < t.numel() else flat.as_strided(t.shape, strides)


@mutant(
    "attention",
    "P12",
    "Keys are read as if they were contiguous.",
    reports="Reported: pytorch/pytorch#181133, pytorch/pytorch#112577.",
    smallest="two keys of two features, features first in memory",
)
def strides_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    keys = as_if_contiguous(k)
    return flash.attention(q, keys, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def read_on(t: Tensor) -> Tensor:
    """The memory in order, from its start again where it ends."""
    if 0 not in t.stride():
        return t
    held = t.untyped_storage().nbytes() // t.element_size() - int(t.storage_offset())
    flat = t.as_strided((held,), (1,))
    return flat[torch.arange(t.numel()) % held].view(t.shape)


@mutant(
    "attention",
    "P12",
    "Expanded values are read on in memory instead of again: a stride of 0 is taken for that of a contiguous tensor.",
    smallest="two sequences of two heads with one key, all heads of a sequence alike and expanded",
)
def stride_zero_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    values = read_on(v)
    return flash.attention(q, k, values, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def gathered(k: Tensor) -> Tensor:
    """Keys by their own offsets, in int32."""
    step = k.stride(2)
    if step * (k.shape[2] - 1) < 2**31:
        return k
    held = k.untyped_storage().nbytes() // k.element_size()
    start = (torch.arange(k.shape[2]) * step).to(torch.int32).long() % (held - k.shape[3])
    flat = k.as_strided((held,), (1,), 0)
    rows = flat[start[:, None] + torch.arange(k.shape[3])]
    return rows.expand(*k.shape[:2], *rows.shape)


@mutant(
    "attention",
    "P20",
    "A key's place is counted in 32 bits, and wraps.",
    reports="Reported: thu-ml/SageAttention#386, Dao-AILab/flash-attention#2260.",
    smallest="three keys, 2^30 elements apart",
)
def offset_wraps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    keys = gathered(k)
    return flash.attention(q, keys, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
