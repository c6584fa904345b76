"""FlashAttention's forward pass in Triton: online softmax over tiles of keys, nothing of size Sq x Sk stored.

Dao, "FlashAttention-2" (arXiv 2307.08691), algorithm 1. For each tile of queries, tiles of keys pass by and
update a running maximum m, row sum l and accumulator acc:

    s = scale q k^T     m' = max(m, max s)     p = e^(s-m')
    l = l e^(m-m') + sum p     acc = acc e^(m-m') + p v

at the end O = acc / l and L = m + ln l. Where precision is decided: dots accumulate in float32 and, for
float32 inputs, multiply in IEEE float32 (no tf32); s, m, l and acc are float32; p is cast to the inputs'
dtype for the second dot, while l sums it uncast. That is the contract `flash`; for float32 inputs, where the
cast does nothing, it is the contract `fp32` as well.

Kernels here call Triton's builtins only, so that `targets.triton_interpreter.launch` can interpret them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from targets.triton_interpreter import launch

TILE_Q = 64
TILE_K = 32  # small, so that short test inputs already cross tile borders
MAX_HEAD_DIM = 256
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    heads, group, queries, keys, tiles,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    IS_CAUSAL: tl.constexpr, RETURN_LSE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries of one head. Strides are in elements; out and lse are contiguous."""
    program = tl.program_id(0)
    tile = program % tiles
    sequence = (program // tiles).to(tl.int64)  # 64 bits before any stride: tensors beyond 2^31 elements exist
    batch = sequence // heads
    head = sequence % heads
    kv_head = head // group

    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    row_ok = row[:, None] < queries
    row_wide = row[:, None].to(tl.int64)
    dim_wide = dim.to(tl.int64)
    value_wide = value_dim.to(tl.int64)

    # Padding beyond a head dimension is zero in q and in k: it adds exact zeros to the scores.
    q_at = q_ptr + batch * q_batch + head * q_head + row_wide * q_row + dim_wide[None, :] * q_col
    q = tl.load(q_at, mask=row_ok & (dim[None, :] < HEAD_DIM), other=0.0)
    k_at = k_ptr + batch * k_batch + kv_head * k_head + dim_wide[:, None] * k_col
    v_at = v_ptr + batch * v_batch + kv_head * v_head + value_wide[None, :] * v_col

    running_max = tl.full((TILE_Q,), float("-inf"), tl.float32)
    row_sum = tl.full((TILE_Q,), 0.0, tl.float32)
    acc = tl.full((TILE_Q, VALUE_PAD), 0.0, tl.float32)

    last_visible = row[:, None] + (keys - queries)  # causal, aligned at the bottom right
    stop = keys
    if IS_CAUSAL:
        stop = tl.minimum(keys, (tile + 1) * TILE_Q + keys - queries)
    for start in range(0, stop, TILE_K):
        col = start + tl.arange(0, TILE_K)
        col_wide = col.to(tl.int64)
        k_ok = (dim[:, None] < HEAD_DIM) & (col[None, :] < keys)
        k = tl.load(k_at + col_wide[None, :] * k_row, mask=k_ok, other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * scale
        visible = col[None, :] < keys
        if IS_CAUSAL:
            visible = visible & (col[None, :] <= last_visible)
        s = tl.where(visible, s, float("-inf"))

        new_max = tl.maximum(running_max, tl.reduce(s, 1, tl.standard._elementwise_max))
        # A row that has seen no key yet has the maximum -inf: shift by 0 instead, as -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp(s - shift[:, None])
        rescale = tl.exp(running_max - shift)
        row_sum = row_sum * rescale + tl.reduce(p, 1, tl.standard._sum_combine)
        running_max = new_max

        # Keys beyond the end weigh exactly 0, but 0 times what lies in memory there could be NaN: load 0.
        v_ok = (col[:, None] < keys) & (value_dim[None, :] < VALUE_DIM)
        v = tl.load(v_at + col_wide[:, None] * v_row, mask=v_ok, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    # Chosen by the row sum: a NaN is no empty row, and acc of an empty row may hold a masked value's NaN.
    empty = row_sum == 0.0
    out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, row_sum)[:, None])
    out_row = sequence * queries + row_wide
    out_at = out_ptr + out_row * VALUE_DIM + value_wide[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_ok & (value_dim[None, :] < VALUE_DIM))
    if RETURN_LSE:
        lse_at = lse_ptr + sequence * queries + row.to(tl.int64)
        tl.store(lse_at, running_max + tl.log(row_sum), mask=row < queries)  # empty row: -inf + ln 0


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v, one pass over the keys.

    q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of one dtype (float32, float16, bfloat16) on one
    device, any strides; Hq a multiple of Hkv, query head h reads KV head h // (Hq / Hkv); D and Dv up to 256.
    `scale` defaults to 1/sqrt(D). `is_causal` aligns at the bottom right: query i sees keys j <= i + Sk - Sq.

    Returns out [B, Hq, Sq, Dv] in the inputs' dtype, and with `return_lse` also ln sum e^S, float32
    [B, Hq, Sq]. A row that sees no key gives 0 and -inf. A NaN or infinity at a key that only the causal mask
    hides may reach rows of the same tile through v (0 * NaN), never through k. Raises ValueError for other
    shapes, TypeError for other dtypes, NotImplementedError for bfloat16 where it would have to be interpreted
    and cannot be.
    """
    _validate(q, k, v)
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    out = torch.empty((batch, heads, queries, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    if out.numel():
        arguments = attention_arguments(head_dim, value_dim, is_causal=is_causal, return_lse=return_lse)
        tiles = triton.cdiv(queries, TILE_Q)
        strides = {
            f"{name}_{axis}": tensor.stride(position)
            for name, tensor in (("q", q), ("k", k), ("v", v))
            for position, axis in enumerate(("batch", "head", "row", "col"))
        }
        arguments |= strides | {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse,
            "scale": 1.0 / math.sqrt(head_dim) if scale is None else float(scale),
            "heads": heads, "group": heads // kv_heads, "queries": queries, "keys": keys, "tiles": tiles,
        }  # fmt: skip
        grid = (tiles * batch * heads,)
        launch(attention_kernel, grid, arguments, **attention_options(head_dim, value_dim))
    return (out, lse) if return_lse else out


def attention_arguments(head_dim: int, value_dim: int, *, is_causal: bool, return_lse: bool) -> dict[str, Any]:
    """The compile-time arguments of `attention_kernel`."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HEAD_PAD": max(16, triton.next_power_of_2(head_dim)),  # the shortest dot that a matrix engine takes
        "VALUE_PAD": max(16, triton.next_power_of_2(value_dim)),
        "IS_CAUSAL": is_causal,
        "RETURN_LSE": return_lse,
        "TILE_Q": TILE_Q,
        "TILE_K": TILE_K,
    }


def attention_options(head_dim: int, value_dim: int) -> dict[str, int]:
    """Launch options for compiled kernels; float32 at D = 256 then needs 104 KiB of shared memory."""
    return {"num_warps": 8, "num_stages": 2 if max(head_dim, value_dim) <= 128 else 1}


def _validate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        known = ", ".join(DTYPES.values())
        raise TypeError(f"q, k, v must share one dtype of {known}; got {q.dtype}, {k.dtype}, {v.dtype}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [B, H, S, D]; got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] disagree: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of KV heads: {shapes}")
    if not (1 <= q.shape[3] <= MAX_HEAD_DIM and v.shape[3] <= MAX_HEAD_DIM):
        raise ValueError(f"head dimensions must be 1 to {MAX_HEAD_DIM}: {shapes}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")


attention.__attn_oracle__ = {  # type: ignore[attr-defined]
    "op": "attention",
    "dtypes": ("fp32", "fp16", "bf16"),
    "devices": ("cpu", "cuda"),
    "contract": "flash",
    "conventions": {
        "causal_alignment": "bottom_right",
        "lse_base": "e",
        "empty_row": "zero",
        "empty_row_lse": "-inf",
        "masked_nan": "leaks",
    },
    "framework": "torch",
    "interpreted": True,
    "description": "FlashAttention forward in Triton (interpreted on a CPU), tiles of 64 queries and 32 keys",
}
