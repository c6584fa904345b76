"""The backward kernels of `targets.builtin.triton.flash`: P is recomputed from the LSE, nothing of size Sq x Sk is
stored.

Dao, "FlashAttention-2" (arXiv 2307.08691), algorithm 2, in three kernels:

    preprocess   D_i = sum_c dO_ic O_ic - dL_i;   with a sink also p_sink,i D_i
    dk, dv       one tile of keys of one KV head; all query heads of its group and their tiles of queries pass by
    dq           one tile of queries of one head; tiles of keys pass by

    P = e^(S - L)    dV = P^T dO    dS = P (dO V^T - D) (1 - tanh^2(S/c))    dQ = scale dS K    dK = scale dS^T Q

dL is the gradient of the LSE, zero unless somebody uses it. Where precision is decided: dots accumulate in float32
and multiply float32 inputs in IEEE float32; S, P, D and dS are float32; P and dS are cast to the inputs' dtype
before they are multiplied; O, as the forward pass stored it, is in the inputs' dtype. A group of query heads
shares one float32 sum of dK and dV. No atomic operations: the same bits every time. Entries of dS at hidden keys
are chosen to be zero, so that a NaN in a hidden value stays away from dQ and dK. Only where the gradient of an
additive mask is asked for is its dS stored, in float32.
"""

import torch
import triton
import triton.language as tl

from targets.builtin.triton.flash_arguments import Options, strides_of, widths
from targets.builtin.triton.interpreter import launch
from targets.builtin.triton.scores import score_tile

AXES = ("batch", "head", "row", "col")


@triton.jit
def delta_kernel(
    out_ptr, do_ptr, dlse_ptr, lse_ptr, sinks_ptr, delta_ptr, dsink_ptr,
    out_row, do_batch, do_head, do_row, do_col,
    heads, queries, tiles,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SINKS: tl.constexpr, HAS_DLSE: tl.constexpr,
    TILE_Q: tl.constexpr,
):  # fmt: skip
    """delta [B, Hq, Sq] and, with a sink, each row's part of its gradient; `out` and all rows are contiguous."""
    program = tl.program_id(0)
    sequence = (program // tiles).to(tl.int64)
    row = (program % tiles * TILE_Q + tl.arange(0, TILE_Q)).to(tl.int64)
    col = tl.arange(0, VALUE_PAD).to(tl.int64)
    row_ok = row < queries
    ok = row_ok[:, None] & (col[None, :] < VALUE_DIM)
    do_at = do_ptr + sequence // heads * do_batch + sequence % heads * do_head
    do = tl.load(do_at + row[:, None] * do_row + col[None, :] * do_col, mask=ok, other=0.0).to(tl.float32)
    place = sequence * queries + row
    out = tl.load(out_ptr + place[:, None] * out_row + col[None, :], mask=ok, other=0.0).to(tl.float32)
    delta = tl.reduce(do * out, 1, tl.standard._sum_combine)
    if HAS_DLSE:
        delta = delta - tl.load(dlse_ptr + place, mask=row_ok, other=0.0)
    tl.store(delta_ptr + place, delta, mask=row_ok)
    if SINKS:
        lse = tl.load(lse_ptr + place, mask=row_ok, other=0.0)
        sink = tl.load(sinks_ptr + sequence % heads)
        weight = tl.where(sink == float("-inf"), 0.0, tl.exp(sink - lse))
        tl.store(dsink_ptr + place, -weight * delta, mask=row_ok)


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, slopes_ptr, mask_ptr,
    scale, softcap, left, right,
    q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col, do_batch, do_head, do_row, do_col,
    mask_batch, mask_head, mask_row, mask_col,
    heads, group, queries, keys, tiles,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of keys of one KV head. Scores are held turned around, [keys, queries]."""
    program = tl.program_id(0)
    tile = program % tiles
    sequence = (program // tiles).to(tl.int64)
    kv_heads = heads // group
    batch = sequence // kv_heads
    kv_head = sequence % kv_heads

    col = tile * TILE_K + tl.arange(0, TILE_K)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    col_wide = col.to(tl.int64)
    dim_wide = dim.to(tl.int64)
    value_wide = value_dim.to(tl.int64)
    k_ok = (col[:, None] < keys) & (dim[None, :] < HEAD_DIM)
    v_ok = (col[:, None] < keys) & (value_dim[None, :] < VALUE_DIM)
    k_at = k_ptr + batch * k_batch + kv_head * k_head + col_wide[:, None] * k_row + dim_wide[None, :] * k_col
    v_at = v_ptr + batch * v_batch + kv_head * v_head + col_wide[:, None] * v_row + value_wide[None, :] * v_col
    k = tl.load(k_at, mask=k_ok, other=0.0)
    v = tl.load(v_at, mask=v_ok, other=0.0)
    dk = tl.full((TILE_K, HEAD_PAD), 0.0, tl.float32)
    dv = tl.full((TILE_K, VALUE_PAD), 0.0, tl.float32)

    # The first query that sees the tile's first key, the last one that sees its last key.
    first = 0
    stop = queries
    if BOUND_RIGHT:
        first = tl.maximum(tile * TILE_K - (keys - queries) - right, 0) // TILE_Q * TILE_Q
    if BOUND_LEFT:
        stop = tl.minimum(queries, tl.minimum((tile + 1) * TILE_K, keys) - (keys - queries) + left)
    for member in range(0, group):
        head = kv_head * group + member
        q_head_at = q_ptr + batch * q_batch + head * q_head + dim_wide[:, None] * q_col
        do_head_at = do_ptr + batch * do_batch + head * do_head + value_wide[None, :] * do_col
        statistics = (batch * heads + head) * queries
        mask_at = mask_ptr + batch * mask_batch + head * mask_head
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + batch * heads + head)
        for start in range(first, stop, TILE_Q):
            row = start + tl.arange(0, TILE_Q)
            row_wide = row.to(tl.int64)
            row_ok = row < queries
            q = tl.load(
                q_head_at + row_wide[None, :] * q_row, mask=row_ok[None, :] & (dim[:, None] < HEAD_DIM), other=0.0
            )
            do_ok = row_ok[:, None] & (value_dim[None, :] < VALUE_DIM)
            do = tl.load(do_head_at + row_wide[:, None] * do_row, mask=do_ok, other=0.0)
            lse = tl.load(lse_ptr + statistics + row_wide, mask=row_ok, other=0.0)
            delta = tl.load(delta_ptr + statistics + row_wide, mask=row_ok, other=0.0)
            products = tl.dot(k, q, input_precision="ieee")
            s, tamed, visible = score_tile(
                products, row[None, :], col[:, None], queries, keys, scale, softcap, left, right, slope,
                mask_at, mask_row, mask_col, BOUND_LEFT, BOUND_RIGHT, CAP, ALIBI, MASK,
            )  # fmt: skip
            # An empty row has the LSE -inf, and -inf - -inf is NaN: any number will do, it sees nothing.
            p = tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[None, :])
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            if CAP:
                ds = ds * (1.0 - tamed * tamed)
            ds = tl.where(visible, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision="ieee")

    kind = dk_ptr.dtype.element_ty
    place = sequence * keys + col_wide[:, None]
    tl.store(dk_ptr + place * HEAD_DIM + dim_wide[None, :], (dk * scale).to(kind), mask=k_ok)
    tl.store(dv_ptr + place * VALUE_DIM + value_wide[None, :], dv.to(kind), mask=v_ok)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dbias_ptr, slopes_ptr, mask_ptr,
    scale, softcap, left, right,
    q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col, do_batch, do_head, do_row, do_col,
    mask_batch, mask_head, mask_row, mask_col,
    heads, group, queries, keys, tiles,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DBIAS: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries of one head. dbias is contiguous float32 [B, Hq, Sq, Sk]."""
    program = tl.program_id(0)
    tile = program % tiles
    sequence = (program // tiles).to(tl.int64)
    batch = sequence // heads
    head = sequence % heads
    kv_head = head // group

    row = tile * TILE_Q + tl.arange(0, TILE_Q)
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    row_wide = row.to(tl.int64)
    dim_wide = dim.to(tl.int64)
    value_wide = value_dim.to(tl.int64)
    row_ok = row < queries
    q_ok = row_ok[:, None] & (dim[None, :] < HEAD_DIM)
    q_at = q_ptr + batch * q_batch + head * q_head + row_wide[:, None] * q_row + dim_wide[None, :] * q_col
    do_at = do_ptr + batch * do_batch + head * do_head + row_wide[:, None] * do_row + value_wide[None, :] * do_col
    q = tl.load(q_at, mask=q_ok, other=0.0)
    do = tl.load(do_at, mask=row_ok[:, None] & (value_dim[None, :] < VALUE_DIM), other=0.0)
    lse = tl.load(lse_ptr + sequence * queries + row_wide, mask=row_ok, other=0.0)
    delta = tl.load(delta_ptr + sequence * queries + row_wide, mask=row_ok, other=0.0)
    shift = tl.where(lse == float("-inf"), 0.0, lse)
    k_at = k_ptr + batch * k_batch + kv_head * k_head + dim_wide[:, None] * k_col
    v_at = v_ptr + batch * v_batch + kv_head * v_head + value_wide[:, None] * v_col
    mask_at = mask_ptr + batch * mask_batch + head * mask_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + sequence)
    dq = tl.full((TILE_Q, HEAD_PAD), 0.0, tl.float32)

    first = 0
    stop = keys
    if BOUND_RIGHT:
        stop = tl.minimum(stop, tl.minimum((tile + 1) * TILE_Q, queries) + keys - queries + right)
    if BOUND_LEFT:
        first = tl.maximum(tile * TILE_Q + keys - queries - left, 0) // TILE_K * TILE_K
    for start in range(first, stop, TILE_K):
        col = start + tl.arange(0, TILE_K)
        col_wide = col.to(tl.int64)
        k_ok = (dim[:, None] < HEAD_DIM) & (col[None, :] < keys)
        v_ok = (value_dim[:, None] < VALUE_DIM) & (col[None, :] < keys)
        k = tl.load(k_at + col_wide[None, :] * k_row, mask=k_ok, other=0.0)
        v = tl.load(v_at + col_wide[None, :] * v_row, mask=v_ok, other=0.0)
        products = tl.dot(q, k, input_precision="ieee")
        s, tamed, visible = score_tile(
            products, row[:, None], col[None, :], queries, keys, scale, softcap, left, right, slope,
            mask_at, mask_row, mask_col, BOUND_LEFT, BOUND_RIGHT, CAP, ALIBI, MASK,
        )  # fmt: skip
        p = tl.exp(s - shift[:, None])
        ds = p * (tl.dot(do, v, input_precision="ieee") - delta[:, None])
        if DBIAS:  # the bias joins behind the soft cap
            dbias_at = dbias_ptr + (sequence * queries + row_wide[:, None]) * keys + col_wide[None, :]
            tl.store(dbias_at, tl.where(visible, ds, 0.0), mask=row_ok[:, None] & (col[None, :] < keys))
        if CAP:
            ds = ds * (1.0 - tamed * tamed)
        ds = tl.where(visible, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision="ieee")

    dq_at = dq_ptr + (sequence * queries + row_wide[:, None]) * HEAD_DIM + dim_wide[None, :]
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_ok)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    options: Options, *, dlse: torch.Tensor | None = None, with_dbias: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """dq, dk, dv in the inputs' dtype; with a sink dsinks float32 [Hq]; if asked for dbias float32 [B, Hq, Sq, Sk].

    `out` [B, Hq, Sq, Dv] and `lse` [B, Hq, Sq], both contiguous, as `targets.builtin.triton.flash_forward.forward` gave
    them for the same q, k, v and options; `do` and `dlse` are the gradients of out and of the LSE.
    """
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta, dsink = (torch.zeros((batch, heads, queries), dtype=torch.float32, device=q.device) for _ in range(2))
    dbias = torch.zeros((batch, heads, queries, keys) if with_dbias else (1,), dtype=torch.float32, device=q.device)
    sinks = options.sinks
    tile_q, tile_k = backward_tiles(head_dim, value_dim)
    if lse.numel() and keys:
        rows = triton.cdiv(queries, tile_q)
        gradient = {"do_ptr": do, **strides_of("do", do, AXES)}
        launch(delta_kernel, (rows * batch * heads,), gradient | {
            "out_ptr": out, "lse_ptr": lse, "delta_ptr": delta, "dsink_ptr": dsink, "out_row": value_dim,
            "dlse_ptr": lse if dlse is None else dlse.contiguous(), "sinks_ptr": lse if sinks is None else sinks,
            "heads": heads, "queries": queries, "tiles": rows, "VALUE_DIM": value_dim,
            "VALUE_PAD": widths(head_dim, value_dim)["VALUE_PAD"], "SINKS": sinks is not None,
            "HAS_DLSE": dlse is not None, "TILE_Q": tile_q,
        })  # fmt: skip
        shared = options.values(q) | gradient | backward_arguments(head_dim, value_dim, options.switches()) | {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "lse_ptr": lse, "delta_ptr": delta,
            **strides_of("q", q, AXES), **strides_of("k", k, AXES), **strides_of("v", v, AXES),
            "heads": heads, "group": heads // kv_heads, "queries": queries, "keys": keys,
        }  # fmt: skip
        columns = triton.cdiv(keys, tile_k)
        settings = backward_options(head_dim, value_dim)
        own = {"dk_ptr": dk, "dv_ptr": dv, "tiles": columns}
        launch(dkdv_kernel, (columns * batch * kv_heads,), shared | own, **settings)
        own = {"dq_ptr": dq, "dbias_ptr": dbias, "tiles": rows, "DBIAS": with_dbias}
        launch(dq_kernel, (rows * batch * heads,), shared | own, **settings)
    found = {"dq": dq, "dk": dk, "dv": dv}
    if with_dbias:
        found["dbias"] = dbias
    if sinks is not None:
        found["dsinks"] = dsink.sum(dim=(0, 2))
    return found


def backward_tiles(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Queries and keys of a tile: what float32 at these widths leaves room for in shared memory."""
    return (32, 32) if max(head_dim, value_dim) <= 128 else (16, 32)


def backward_arguments(head_dim: int, value_dim: int, switches: dict[str, object]) -> dict[str, object]:
    """The compile-time arguments of `dkdv_kernel` and `dq_kernel`; `switches` as of `Options.switches`."""
    tile_q, tile_k = backward_tiles(head_dim, value_dim)
    return {**widths(head_dim, value_dim), **switches, "TILE_Q": tile_q, "TILE_K": tile_k}


def backward_options(head_dim: int, value_dim: int) -> dict[str, int]:
    """Launch options for compiled kernels."""
    return {"num_warps": 8 if max(head_dim, value_dim) > 64 else 4, "num_stages": 1}
