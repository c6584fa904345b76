"""The forward kernel of `targets.builtin.triton.flash`: dense, variable-length and paged layouts of one online softmax.

For each tile of queries, tiles of keys pass by and update a running maximum m, row sum l and accumulator acc
(Dao, arXiv 2307.08691, algorithm 1):

    m' = max(m, max s)     p = e^(s-m')     l = l e^(m-m') + sum p     acc = acc e^(m-m') + p v

at the end O = acc / l and L = m + ln l; a sink is one more logit of l. Tiles of keys that a causal mask or a
window hides from the whole tile of queries are not visited.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from targets.builtin.triton.flash_arguments import Options, strides_of, widths
from targets.builtin.triton.interpreter import launch
from targets.builtin.triton.scores import score_tile

TILE_Q = 64
TILE_K = 32  # small, so that short test inputs already cross tile borders
DENSE, VARLEN, PAGED = 0, 1, 2


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, mask_ptr, starts_q_ptr, starts_k_ptr, pages_ptr,
    scale, softcap, left, right,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    out_batch, out_head, out_row,
    lse_batch, lse_head,
    mask_batch, mask_head, mask_row, mask_col,
    pages_batch, heads, group, queries, keys, tiles,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    SINKS: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, RETURN_LSE: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries of one head. Strides are in elements; rows of out and lse are contiguous.

    LAYOUT 1 (variable length): queries and keys of sequence b are rows starts[b] to starts[b + 1]. LAYOUT 2
    (paged): starts_k holds the lengths, and key j of sequence b is row j % PAGE of page pages[b, j // PAGE].
    """
    program = tl.program_id(0)
    tile = program % tiles
    sequence = (program // tiles).to(tl.int64)  # 64 bits before any stride: tensors beyond 2^31 elements exist
    batch = sequence // heads
    head = sequence % heads
    kv_head = head // group

    q_start = batch * 0
    k_start = batch * 0
    if LAYOUT == 1:
        first_q = tl.load(starts_q_ptr + batch)
        first_k = tl.load(starts_k_ptr + batch)
        queries = tl.load(starts_q_ptr + batch + 1) - first_q
        keys = tl.load(starts_k_ptr + batch + 1) - first_k
        q_start = first_q.to(tl.int64)
        k_start = first_k.to(tl.int64)
    if LAYOUT == 2:
        keys = tl.load(starts_k_ptr + batch)

    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    row_ok = row[:, None] < queries
    row_wide = row[:, None].to(tl.int64) + q_start
    dim_wide = dim.to(tl.int64)
    value_wide = value_dim.to(tl.int64)

    # Padding beyond a head dimension is zero in q and in k: it adds exact zeros to the scores.
    q_at = q_ptr + batch * q_batch + head * q_head + row_wide * q_row + dim_wide[None, :] * q_col
    q = tl.load(q_at, mask=row_ok & (dim[None, :] < HEAD_DIM), other=0.0)
    k_at = k_ptr + kv_head * k_head + k_start * k_row + dim_wide[:, None] * k_col
    v_at = v_ptr + kv_head * v_head + k_start * v_row + value_wide[None, :] * v_col
    if LAYOUT != 2:
        k_at += batch * k_batch
        v_at += batch * v_batch
    mask_at = mask_ptr + batch * mask_batch + head * mask_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + sequence)

    running_max = tl.full((TILE_Q,), float("-inf"), tl.float32)
    row_sum = tl.full((TILE_Q,), 0.0, tl.float32)
    acc = tl.full((TILE_Q, VALUE_PAD), 0.0, tl.float32)

    # The last visible key of the tile's last row, the first one of its first row.
    first = 0
    stop = tl.where(tile * TILE_Q < queries, keys, 0)
    if BOUND_RIGHT:
        stop = tl.minimum(stop, tl.minimum((tile + 1) * TILE_Q, queries) + keys - queries + right)
    if BOUND_LEFT:
        first = tl.maximum(tile * TILE_Q + keys - queries - left, 0) // TILE_K * TILE_K
    for start in range(first, stop, TILE_K):
        col = start + tl.arange(0, TILE_K)
        col_wide = col.to(tl.int64)
        key_at = col_wide * k_row
        value_at = col_wide * v_row
        if LAYOUT == 2:
            page_at = pages_ptr + batch * pages_batch + col_wide // PAGE
            page = tl.load(page_at, mask=col < keys, other=0).to(tl.int64)
            key_at = page * k_batch + col_wide % PAGE * k_row
            value_at = page * v_batch + col_wide % PAGE * v_row
        k_ok = (dim[:, None] < HEAD_DIM) & (col[None, :] < keys)
        k = tl.load(k_at + key_at[None, :], mask=k_ok, other=0.0)
        products = tl.dot(q, k, input_precision="ieee")
        s, _, _ = score_tile(
            products, row[:, None], col[None, :], queries, keys, scale, softcap, left, right, slope,
            mask_at, mask_row, mask_col, BOUND_LEFT, BOUND_RIGHT, CAP, ALIBI, MASK,
        )  # fmt: skip

        new_max = tl.maximum(running_max, tl.reduce(s, 1, tl.standard._elementwise_max))
        # A row that has seen no key yet has the maximum -inf: shift by 0 instead, as -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp(s - shift[:, None])
        rescale = tl.exp(running_max - shift)
        row_sum = row_sum * rescale + tl.reduce(p, 1, tl.standard._sum_combine)
        running_max = new_max

        # Keys beyond the end weigh exactly 0, but 0 times what lies in memory there could be NaN: load 0.
        v_ok = (col[:, None] < keys) & (value_dim[None, :] < VALUE_DIM)
        v = tl.load(v_at + value_at[:, None], mask=v_ok, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    # Chosen by the keys' row sum: a NaN is no empty row, and acc of an empty row may hold a masked value's NaN.
    empty = row_sum == 0.0
    if SINKS:
        sink = tl.load(sinks_ptr + head)
        new_max = tl.maximum(running_max, sink)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(running_max - shift)
        row_sum = row_sum * rescale + tl.exp(sink - shift)
        acc = acc * rescale[:, None]
        running_max = new_max
    out = tl.where(empty[:, None], 0.0, acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None])
    out_at = out_ptr + batch * out_batch + head * out_head + row_wide * out_row + value_wide[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_ok & (value_dim[None, :] < VALUE_DIM))
    if RETURN_LSE:
        lse_at = lse_ptr + batch * lse_batch + head * lse_head + q_start + row.to(tl.int64)
        tl.store(lse_at, running_max + tl.log(row_sum), mask=row < queries)  # empty row: -inf + ln 0


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, *, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Hq, Sq, Dv], LSE float32 [B, Hq, Sq], unwritten unless asked for) of valid q, k, v."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    out = torch.empty((batch, heads, queries, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    axes = ("batch", "head", "row", "col")
    layout = {
        **strides_of("q", q, axes), **strides_of("k", k, axes), **strides_of("v", v, axes),
        **strides_of("out", out, ("batch", "head", "row", "")), **strides_of("lse", lse, ("batch", "head", "")),
        "group": heads // kv_heads, "queries": queries, "keys": keys,
    }  # fmt: skip
    if out.numel() or (lse.numel() and return_lse):
        run(q, k, v, out, lse, options, layout, batch=batch, heads=heads, return_lse=return_lse)
    return out, lse


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    options: Options, layout: dict[str, Any], *, batch: int, heads: int, return_lse: bool,
    starts_q: torch.Tensor | None = None, starts_k: torch.Tensor | None = None, pages: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel; `layout` holds strides, group, queries (the most of any sequence) and keys."""
    tiles = triton.cdiv(layout["queries"], TILE_Q)
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    kind = PAGED if pages is not None else VARLEN if starts_q is not None else DENSE
    page = k.shape[1] if pages is not None else 1
    arguments = options.values(q) | layout | {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse,
        "sinks_ptr": q if options.sinks is None else options.sinks,
        "starts_q_ptr": q if starts_q is None else starts_q, "starts_k_ptr": q if starts_k is None else starts_k,
        "pages_ptr": q if pages is None else pages, "pages_batch": 0 if pages is None else pages.stride(0),
        "heads": heads, "tiles": tiles,
    }  # fmt: skip
    switches = attention_arguments(
        head_dim, value_dim, options.switches(), sinks=options.sinks is not None, layout=kind, page=page,
        return_lse=return_lse,
    )  # fmt: skip
    grid = (tiles * batch * heads,)
    launch(attention_kernel, grid, arguments | switches, **attention_options(head_dim, value_dim))


def attention_arguments(
    head_dim: int,
    value_dim: int,
    switches: dict[str, object],
    *,
    sinks: bool = False,
    layout: int = DENSE,
    page: int = 1,
    return_lse: bool = True,
) -> dict[str, object]:
    """The compile-time arguments of `attention_kernel`; `switches` as of `Options.switches`."""
    return {
        **widths(head_dim, value_dim),
        **switches,
        "SINKS": sinks,
        "LAYOUT": layout,
        "PAGE": page,
        "RETURN_LSE": return_lse,
        "TILE_Q": TILE_Q,
        "TILE_K": TILE_K,
    }


def attention_options(head_dim: int, value_dim: int) -> dict[str, int]:
    """Launch options for compiled kernels; float32 at D = 256 then needs 104 KiB of shared memory."""
    return {"num_warps": 8, "num_stages": 2 if max(head_dim, value_dim) <= 128 else 1}
