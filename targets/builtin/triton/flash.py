"""FlashAttention in Triton, forward and backward: online softmax over tiles of keys, nothing of size Sq x Sk stored.

`targets.builtin.triton.flash_forward` and `targets.builtin.triton.flash_backward` hold the kernels and say where
precision is decided: the contract `flash`; for float32 inputs, where casts do nothing, it is the contract `fp32` as
well.

The gradient flows through `attention` in torch's own way; `attention_backward` is the same as one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from targets.builtin.triton.flash_arguments import DTYPES, Options, Window, options_of, validate
from targets.builtin.triton.flash_backward import backward
from targets.builtin.triton.flash_forward import TILE_K, TILE_Q, forward
from targets.calling.declare import declare

__all__ = ["DTYPES", "TILE_K", "TILE_Q", "attention", "attention_backward"]


class _Attention(torch.autograd.Function):
    """(out, LSE) of q, k, v, sinks and an additive mask, of which torch asks the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(q, k, v, options, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.sinks, ctx.mask = (None if t is None else (t.shape, t.dtype) for t in (sinks, mask))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        found = backward(q, k, v, out, lse, do, ctx.options, dlse=dlse, with_dbias=wanted[4])
        dsinks = found["dsinks"].to(ctx.sinks[1]) if wanted[3] else None
        dbias = found["dbias"].sum_to_size(ctx.mask[0]).to(ctx.mask[1]) if wanted[4] else None
        return found["dq"], found["dk"], found["dv"], dsinks, dbias, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(S) v, one pass over the keys.

    q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of one dtype (float32, float16, bfloat16) on one
    device, any strides; Hq a multiple of Hkv, query head h reads KV head h // (Hq / Hkv); D and Dv up to 256.
    S = scale q k^T (`scale` defaults to 1/sqrt(D)); then, each only if given, `softcap` c: c tanh(S/c);
    `alibi_slopes` [Hq] or [B, Hq]: S - slope |i - j|; a floating `attn_mask`, broadcast to [B, Hq, Sq, Sk]: added.
    i is the query's position from the bottom right: row + Sk - Sq. Hidden are keys j > i if `is_causal`, keys
    outside i - left <= j <= i + right for `window_size` (left, right; -1 without end), and where `attn_mask` is
    False or -inf. `sinks` [Hq] are one more logit of each head's denominator, without a value.

    Returns out [B, Hq, Sq, Dv] in the inputs' dtype, and with `return_lse` also ln sum e^S (with the sink),
    float32 [B, Hq, Sq]. A row that sees no key gives 0 and -inf, or the sink. A NaN or infinity at a hidden key
    may reach rows of the same tile through v (0 * NaN), never through k. Gradients flow to q, k, v, sinks and a
    floating mask. Raises ValueError for other shapes and options, TypeError for other dtypes, NotImplementedError for
    bfloat16 where it would have to be interpreted and cannot be, and for gradients of slopes.
    """
    validate(q, k, v)
    options = options_of(
        q, batch=q.shape[0], heads=q.shape[1], span=q.shape[2] + k.shape[2], keys=k.shape[2], scale=scale,
        is_causal=is_causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        attn_mask=attn_mask,
    )  # fmt: skip
    if torch.is_grad_enabled():
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            raise NotImplementedError("gradients of alibi_slopes")
        if any(t is not None and t.requires_grad for t in (q, k, v, sinks, attn_mask)):
            out, lse = _Attention.apply(q, k, v, sinks, attn_mask, options)
            return (out, lse) if return_lse else out
    out, lse = forward(q, k, v, options, return_lse=return_lse)
    return (out, lse) if return_lse else out


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Gradients of sum(do * attention(q, k, v, ...)), do [B, Hq, Sq, Dv]; arguments and errors as `attention`.

    Returns dq, dk, dv in the inputs' shapes and dtype; with `sinks` dsinks float32 [Hq]; with a floating `attn_mask`
    dbias in its shape, float32.
    """
    validate(q, k, v)
    if do.shape != (*q.shape[:3], v.shape[3]) or do.dtype != q.dtype:
        raise ValueError(f"do must be {q.dtype} [B, Hq, Sq, Dv]; got {do.dtype} {tuple(do.shape)}")
    options = options_of(
        q, batch=q.shape[0], heads=q.shape[1], span=q.shape[2] + k.shape[2], keys=k.shape[2], scale=scale,
        is_causal=is_causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        attn_mask=attn_mask,
    )  # fmt: skip
    with torch.no_grad():
        out, lse = forward(q, k, v, options, return_lse=True)
        biased = attn_mask is not None and attn_mask.is_floating_point()
        found = backward(q, k, v, out, lse, do, options, with_dbias=biased)
    if attn_mask is not None and biased:
        found["dbias"] = found["dbias"].sum_to_size(attn_mask.shape)
    return found


_COMMON: dict[str, Any] = {
    "dtypes": tuple(DTYPES.values()),
    "devices": ("cpu", "cuda"),
    "contract": "flash",
    "framework": "torch",
    "interpreted": True,
}
declare(
    attention,
    _COMMON
    | {
        "op": "attention",
        "conventions": {
            "causal_alignment": "bottom_right",
            "lse_base": "e",
            "empty_row": "zero",
            "empty_row_lse": "-inf",
            "masked_nan": "leaks",
        },
        "description": "FlashAttention forward in Triton (interpreted on a CPU), tiles of 64 queries and 32 keys",
    },
)
declare(
    attention_backward,
    _COMMON
    | {
        "op": "attention_backward",
        "conventions": {"causal_alignment": "bottom_right"},
        "description": "FlashAttention backward in Triton (interpreted on a CPU), P recomputed from the LSE",
    },
)
