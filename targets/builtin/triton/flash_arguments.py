"""What the Triton attention kernels take: validated options, compile-time switches, strides."""

import math
from dataclasses import dataclass

import torch
import triton

MAX_HEAD_DIM = 256
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Window = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one call, ready for a kernel.

    left, right: how far a query sees to each side, -1 without end. softcap: 0 without. slopes: float32 [B, Hq],
    sinks: float32 [Hq], mask: uint8 (a boolean) or floating, viewed as [B, Hq, Sq, Sk]; None without.
    """

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def switches(self) -> dict[str, object]:
        """The compile-time arguments of `targets.builtin.triton.scores.score_tile`."""
        mask = 0 if self.mask is None else 2 if self.mask.is_floating_point() else 1
        return {
            "BOUND_LEFT": self.left >= 0,
            "BOUND_RIGHT": self.right >= 0,
            "CAP": self.softcap > 0,
            "ALIBI": self.slopes is not None,
            "MASK": mask,
        }

    def values(self, unused: torch.Tensor) -> dict[str, object]:
        """Its run-time arguments; `unused` stands where a pointer is not read."""
        strides = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return {
            "scale": self.scale,
            "softcap": float(self.softcap),
            "left": self.left,
            "right": self.right,
            "slopes_ptr": unused if self.slopes is None else self.slopes,
            "mask_ptr": unused if self.mask is None else self.mask,
            **dict(zip(("mask_batch", "mask_head", "mask_row", "mask_col"), strides, strict=True)),
        }


def options_of(
    q: torch.Tensor,
    *,
    batch: int,
    heads: int,
    span: int,
    scale: float | None = None,
    is_causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    keys: int = 0,
) -> Options:
    """The options of one call; `span` = the most queries and keys together: a window that wide hides nothing.

    Raises ValueError for options that fit neither each other nor q [..., D].
    """
    left, right = (-1, -1) if window_size is None else (int(side) for side in window_size)
    if min(left, right) < -1:
        raise ValueError(f"window_size is (left, right), each -1 (no end) or more; got {window_size}")
    left, right = (-1 if side > span else side for side in (left, right))
    if is_causal:
        right = 0
    if softcap is not None and not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive, or None or 0 for none; got {softcap}")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must be [Hq] or [B, Hq]; got {tuple(alibi_slopes.shape)} for {heads} heads")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks must be [Hq]; got {tuple(sinks.shape)} for {heads} heads")
    mask = None
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(batch, heads, q.shape[-2], keys)
    return Options(
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        left=left,
        right=right,
        softcap=float(softcap or 0.0),
        slopes=None if alibi_slopes is None else alibi_slopes.detach().float().expand(batch, heads).contiguous(),
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
        mask=mask,
    )


def strides_of(name: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> dict[str, int]:
    """`name_axis` -> stride in elements; an axis called "" is left out."""
    return {f"{name}_{axis}": step for axis, step in zip(axes, tensor.stride(), strict=True) if axis}


def padded(dim: int) -> int:
    """The power of two that holds `dim`, at least the shortest dot that a matrix engine takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def widths(head_dim: int, value_dim: int) -> dict[str, int]:
    """Compile-time widths; padding beyond a head dimension is loaded as zeros, which add exact zeros."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEAD_PAD": padded(head_dim),
        "VALUE_PAD": padded(value_dim),
    }


def validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless q, k, v are one problem of dense attention."""
    validate_kinds(q, k, v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [B, H, S, D]; got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] disagree: {shapes}")
    validate_heads(q.shape[1], k.shape[1], q.shape[3], v.shape[3], shapes)


def validate_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One supported dtype, one device."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        known = ", ".join(DTYPES.values())
        raise TypeError(f"q, k, v must share one dtype of {known}; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")


def validate_heads(heads: int, kv_heads: int, head_dim: int, value_dim: int, shapes: str) -> None:
    """Grouped heads, and head dimensions that a kernel holds."""
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads: {shapes}")
    if not (1 <= head_dim <= MAX_HEAD_DIM and value_dim <= MAX_HEAD_DIM):
        raise ValueError(f"head dimensions must be 1 to {MAX_HEAD_DIM}: {shapes}")
