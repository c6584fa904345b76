"""torch.nn.functional.scaled_dot_product_attention, one target per backend (PyTorch documentation, "SDPA").

Causal alignment is top_left. No backend may be replaced by another: `sdpa_kernel` raises where the asked one cannot
run.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from targets.calling.declare import declare

Tensor = torch.Tensor


def _run(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, mask: Tensor | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and is_causal:
        raise NotImplementedError("torch SDPA takes attn_mask or is_causal, not both")
    try:
        with sdpa_kernel([backend]):
            return sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            raise NotImplementedError(f"torch has no {backend.name} kernel for these arguments") from error
        raise


def math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The math backend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, Hq, Sq, Dv]."""
    return _run(SDPBackend.MATH, q, k, v, scale, is_causal, attn_mask)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The flash backend (on a CPU: torch's own tiled kernel; on a GPU: FlashAttention 2); needs D == Dv."""
    return _run(SDPBackend.FLASH_ATTENTION, q, k, v, scale, is_causal, attn_mask)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The memory-efficient backend (GPU only)."""
    return _run(SDPBackend.EFFICIENT_ATTENTION, q, k, v, scale, is_causal, attn_mask)


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The cuDNN backend (GPU only)."""
    return _run(SDPBackend.CUDNN_ATTENTION, q, k, v, scale, is_causal, attn_mask)


def flash_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The CPU flash kernel called directly, which also gives the LSE [B, Hq, Sq] in float32 (float64 for fp64)."""
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError("torch's CPU flash kernel needs one head dimension for q, k and v")
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (q, k, v)):
        # Without a word: it reads them as if they were contiguous. torch's public function asks first.
        raise NotImplementedError("torch's CPU flash kernel ignores the stride of the last dimension")
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return (out, lse) if return_lse else out


_COMMON: dict[str, object] = {"op": "attention", "conventions": {"causal_alignment": "top_left"}}
declare(
    math,
    _COMMON
    | {
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "devices": ("cpu", "cuda"),
        "description": "torch SDPA, math backend",
    },
)
declare(
    flash,
    _COMMON
    | {
        "dtypes": ("fp64", "fp32", "fp16", "bf16"),
        "devices": ("cpu", "cuda"),
        "description": "torch SDPA, flash backend",
    },
)
declare(
    flash_lse,
    _COMMON
    | {
        "dtypes": ("fp32", "fp16", "bf16"),
        "devices": ("cpu",),
        # Those of `flash`, which is the same kernel.
        "gradients": False,
        "description": "torch SDPA, CPU flash kernel with its LSE",
    },
)
declare(
    efficient,
    _COMMON
    | {
        "dtypes": ("fp32", "fp16", "bf16"),
        "devices": ("cuda",),
        "description": "torch SDPA, memory-efficient backend",
    },
)
declare(
    cudnn,
    _COMMON
    | {
        "dtypes": ("fp16", "bf16"),
        "devices": ("cuda",),
        "description": "torch SDPA, cuDNN backend",
    },
)
