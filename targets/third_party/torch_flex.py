"""torch.nn.attention.flex_attention, unfused and compiled (Dong et al., "FlexAttention", arXiv 2412.05496).

Causal masks, windows and boolean masks are a `mask_mod` behind a `BlockMask`; soft cap, ALiBi and additive masks are a
`score_mod`, in this order. The functions are ours, what evaluates them is torch's: unfused, a traced plain formula;
compiled, a C++ kernel on a CPU (forward only, no float64, no LSE) and Triton's on a GPU. Positions are aligned at the
bottom right.

Compiling takes some twenty seconds the first time and some four for each new combination of options, dtype and
sizes equal to one; a cache on disk serves later processes. Numbers that may change between calls reach the kernel as
tensors, as Python numbers would be compiled into it; so does the scale, which the unfused target passes as itself.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from targets.calling.declare import declare

Tensor = torch.Tensor
Modification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
UNBOUNDED = 2**31


def _scaled(factor: Tensor) -> Modification:
    return lambda s, b, h, i, j: s * factor


def _capped(inner: Modification | None, cap: Tensor) -> Modification:
    if inner is None:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    return lambda s, b, h, i, j: cap * torch.tanh(inner(s, b, h, i, j) / cap)


def _with_alibi(inner: Modification | None, slopes: Tensor, heads: Tensor, offset: Tensor) -> Modification:
    if inner is None:
        return lambda s, b, h, i, j: s - slopes[b * heads + h] * (i + offset - j).abs()
    return lambda s, b, h, i, j: inner(s, b, h, i, j) - slopes[b * heads + h] * (i + offset - j).abs()


def _with_bias(inner: Modification | None, bias: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Modification:
    if inner is None:
        return lambda s, b, h, i, j: s + bias[((b * heads + h) * rows + i) * keys + j]
    return lambda s, b, h, i, j: inner(s, b, h, i, j) + bias[((b * heads + h) * rows + i) * keys + j]


def _band(offset: Tensor, left: Tensor, right: Tensor) -> Mask:
    return lambda b, h, i, j: (i + offset - j <= left) & (j - i - offset <= right)


def _listed(mask: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Mask:
    return lambda b, h, i, j: mask[((b * heads + h) * rows + i) * keys + j]


def _both(one: Mask | None, other: Mask) -> Mask:
    if one is None:
        return other
    return lambda b, h, i, j: one(b, h, i, j) & other(b, h, i, j)


def _modifications(
    q: Tensor, k: Tensor, factor: float | None, is_causal: bool, attn_mask: Tensor | None,
    window_size: tuple[int, int] | None, softcap: float | None, alibi_slopes: Tensor | None,
) -> tuple[Modification | None, Any]:  # fmt: skip
    """(score_mod, block_mask); ``factor``, if given, scales the scores here."""
    batch, heads, sq = q.shape[:3]
    sk = k.shape[2]

    def number(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=q.device)

    wide = torch.promote_types(q.dtype, torch.float32)
    offset, *sizes = (number(value, torch.int64) for value in (sk - sq, heads, sq, sk))
    score = None if factor is None else _scaled(number(factor, wide))
    if softcap:
        score = _capped(score, number(softcap, wide))
    if alibi_slopes is not None:
        score = _with_alibi(score, _flat(alibi_slopes.to(wide).expand(batch, heads)), sizes[0], offset)
    visible: Mask | None = None
    if is_causal or window_size is not None:
        left, right = (UNBOUNDED if side < 0 else side for side in window_size or (-1, -1))
        right = min(right, 0) if is_causal else right
        visible = _band(offset, number(left, torch.int64), number(right, torch.int64))
    if attn_mask is not None:
        full = attn_mask.expand(batch, heads, sq, sk)
        listed = _listed(_flat(full), *sizes) if full.dtype == torch.bool else None
        if listed is not None:
            visible = _both(visible, listed)
        else:
            score = _with_bias(score, _flat(full.to(wide)), *sizes)
    if visible is None:
        return score, None
    per_head = attn_mask is not None and attn_mask.dtype == torch.bool
    of_batch, of_head = (batch, heads) if per_head else (None, None)
    return score, create_block_mask(visible, of_batch, of_head, sq, sk, device=q.device)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1)


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> out [B, Hq, Sq, Dv] (and LSE [B, Hq, Sq], float32)."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise NotImplementedError("FlexAttention on a CPU is forward only")
    score, mask = _modifications(q, k, None, is_causal, attn_mask, window_size, softcap, alibi_slopes)
    # Even unfused, torch traces once for each shape, for a third of a second, and gives up after eight: the stance
    # evaluates the same formula, bit for bit, without; gradients (on a GPU) need the trace.
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    stance = torch.compiler.set_stance("default" if grad else "force_eager")
    with stance, torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
        out, aux = flex_attention(
            q, k, v, score_mod=score, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    return (out, aux.lse) if return_lse else out


def compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """As `unfused`, without the LSE, which would double the kernels to compile, and without masks, whose kernels torch
    2.13 generates wrongly for a CPU where lengths are dynamic (a name that is not declared).

    To compile less, KV heads are repeated before the call, every head is an entry of the batch, of at least two, head
    dimensions are padded with zeros to multiples of 64 and kernels with ALiBi always have a band of visible keys: torch
    compiles anew for each number of heads and dimensions, and for a batch of one. NotImplementedError where a CPU's
    kernel has no C++ compiler or would have to give gradients.
    """
    if q.device.type == "cpu" and not _has_compiler():
        raise NotImplementedError("FlexAttention's CPU kernel is compiled, and there is no C++ compiler")
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise NotImplementedError("FlexAttention on a CPU is forward only")
    batch, heads = q.shape[:2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    width = v.shape[-1]
    q, k, v = (_of_one_head(t) for t in (q, k, v))
    if alibi_slopes is not None:
        window_size = window_size or (-1, -1)
        alibi_slopes = alibi_slopes.expand(batch, heads).reshape(-1, 1)
        alibi_slopes = torch.nn.functional.pad(alibi_slopes, (0, 0, 0, int(len(alibi_slopes) == 1)))
    score, mask = _modifications(q, k, factor, is_causal, None, window_size, softcap, alibi_slopes)
    with torch._dynamo.config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
        out = _compiled()(q, k, v, score_mod=score, block_mask=mask, scale=1.0)
    out = out[: batch * heads, ..., :width]
    return out.reshape(batch, heads, *out.shape[2:]).contiguous()  # type: ignore[no-any-return]


def _of_one_head(tensor: Tensor) -> Tensor:
    """[B, H, S, D] as [B H, 1, S, 64 n], with zeros for a second entry where there is one and behind D."""
    flat = tensor.flatten(0, 1).unsqueeze(1)
    return torch.nn.functional.pad(flat, (0, -flat.shape[-1] % 64, 0, 0, 0, 0, 0, int(len(flat) == 1))).contiguous()


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.cache
def _has_compiler() -> bool:
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))


_COMMON: dict[str, object] = {
    "op": "attention",
    "devices": ("cpu", "cuda"),
    "conventions": {"causal_alignment": "bottom_right"},
}
declare(
    unfused,
    _COMMON
    | {
        "dtypes": ("fp32", "fp16", "bf16"),
        "description": "torch FlexAttention, not compiled",
    },
)
declare(
    compiled,
    _COMMON
    | {
        "dtypes": ("fp32", "fp16", "bf16"),
        "description": "torch FlexAttention, compiled",
    },
)
