"""MLA decoding in Triton: projections absorbed, latents attended to as they are cached, keys split and merged.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) with W_UK moved to the query and W_UV to the output, so that all heads read
one latent c and one rotary key; keys are split as in Flash-Decoding, so that few queries still fill a GPU:

    q~ = W_UK^T q^C     S = scale (q~ . c + q^R . k^R)     each split: z = softmax(S) c, its LSE
    L = ln sum e^(L_s)     z = sum e^(L_s - L) z_s     O = W_UV z

Where precision is decided: dots accumulate in float32, in IEEE float32 for float32 inputs; q~ is stored in the inputs'
dtype, the dtype of the product with c; both parts of a score are one float32 chain; P is cast to the inputs' dtype; the
latent sums, their merge and the operand z of the last product are float32. That is the contract `flash`, absorbed,
with `up` stored and the latent not. Works for any number of queries, and is made for few.
"""

import torch
import triton
import triton.language as tl

from targets.builtin.triton.flash_arguments import DTYPES, padded, strides_of
from targets.builtin.triton.interpreter import launch
from targets.calling.declare import declare

ROWS = 16
TILE_K = 32
TILE_N = 64
SPLIT_KEYS = 64  # keys worth a split of their own; few, so that short test inputs are split
MOST_SPLITS = 8
MAX_LATENT = 512


@triton.jit
def project_kernel(
    x_ptr, w_ptr, out_ptr,
    x_batch, x_head, x_row, x_col, w_head, w_in, w_out, out_batch, out_head, out_row,
    heads, rows, tiles, inner, columns,
    ROWS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """out[b, h, r] = x[b, h, r] @ w[h], w [inner, columns]; products in x's dtype, float32 if that is float32."""
    program = tl.program_id(0)
    sequence = (program // tiles).to(tl.int64)
    head = sequence % heads
    row = (program % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    x_at = x_ptr + sequence // heads * x_batch + head * x_head + row[:, None] * x_row
    w_at = w_ptr + head * w_head + col[None, :] * w_out
    total = tl.full((ROWS, TILE_N), 0.0, tl.float32)
    for start in range(0, inner, TILE_N):
        place = (start + tl.arange(0, TILE_N)).to(tl.int64)
        x_ok = (row[:, None] < rows) & (place[None, :] < inner)
        w_ok = (place[:, None] < inner) & (col[None, :] < columns)
        x = tl.load(x_at + place[None, :] * x_col, mask=x_ok, other=0.0)
        w = tl.load(w_at + place[:, None] * w_in, mask=w_ok, other=0.0)
        total = tl.dot(x, w.to(x.dtype), total, input_precision="ieee")
    out_at = out_ptr + sequence // heads * out_batch + head * out_head + row[:, None] * out_row + col[None, :]
    ok = (row[:, None] < rows) & (col[None, :] < columns)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def split_kernel(
    q_ptr, q_pe_ptr, c_ptr, k_pe_ptr, part_ptr, lse_ptr, scale,
    pe_batch, pe_head, pe_row, pe_col, c_batch, c_row, c_col, k_pe_batch, k_pe_row, k_pe_col,
    rows, queries, keys, tiles, splits, split_keys,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """One program: one split of the keys for a tile of rows; a row is one query of one head, as all share c.

    q [B, rows, LATENT], part [B, splits, rows, LATENT] and lse [B, splits, rows] are contiguous.
    """
    program = tl.program_id(0)
    split = tl.program_id(1)
    batch = (program // tiles).to(tl.int64)
    row = (program % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = row // queries
    query = row % queries
    latent = tl.arange(0, LATENT_PAD).to(tl.int64)
    rope = tl.arange(0, ROPE_PAD).to(tl.int64)
    row_ok = row < rows
    q_ok = row_ok[:, None] & (latent[None, :] < LATENT)
    q = tl.load(q_ptr + (batch * rows + row[:, None]) * LATENT + latent[None, :], mask=q_ok, other=0.0)
    pe_at = q_pe_ptr + batch * pe_batch + head[:, None] * pe_head + query[:, None] * pe_row + rope[None, :] * pe_col
    q_pe = tl.load(pe_at, mask=row_ok[:, None] & (rope[None, :] < ROPE), other=0.0)
    c_at = c_ptr + batch * c_batch + latent[None, :] * c_col
    k_pe_at = k_pe_ptr + batch * k_pe_batch + rope[None, :] * k_pe_col

    running_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, LATENT_PAD), 0.0, tl.float32)
    last_visible = query[:, None] + (keys - queries)
    first = split * split_keys
    stop = tl.minimum(first + split_keys, keys)
    for start in range(first, stop, TILE_K):
        col = start + tl.arange(0, TILE_K)
        col_wide = col[:, None].to(tl.int64)
        col_ok = col[:, None] < keys
        c = tl.load(c_at + col_wide * c_row, mask=col_ok & (latent[None, :] < LATENT), other=0.0)
        k_pe = tl.load(k_pe_at + col_wide * k_pe_row, mask=col_ok & (rope[None, :] < ROPE), other=0.0)
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        s = tl.dot(q_pe, tl.trans(k_pe), s, input_precision="ieee") * scale
        visible = row_ok[:, None] & (col[None, :] < stop)
        if IS_CAUSAL:
            visible = visible & (col[None, :] <= last_visible)
        s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(running_max, tl.reduce(s, 1, tl.standard._elementwise_max))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp(s - shift[:, None])
        rescale = tl.exp(running_max - shift)
        row_sum = row_sum * rescale + tl.reduce(p, 1, tl.standard._sum_combine)
        running_max = new_max
        acc = tl.dot(p.to(c.dtype), c, acc * rescale[:, None], input_precision="ieee")

    empty = row_sum == 0.0
    part = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, row_sum)[:, None])
    place = (batch * splits + split) * rows + row
    tl.store(part_ptr + place[:, None] * LATENT + latent[None, :], part, mask=q_ok)
    tl.store(lse_ptr + place, running_max + tl.log(row_sum), mask=row_ok)


@triton.jit
def merge_kernel(
    part_ptr, split_lse_ptr, latent_ptr, lse_ptr, rows, tiles, splits,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a tile of rows by their LSEs; everything contiguous and float32."""
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    row = (program % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    latent = tl.arange(0, LATENT_PAD).to(tl.int64)
    row_ok = row < rows
    ok = row_ok[:, None] & (latent[None, :] < LATENT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in range(0, splits):
        place = (batch * splits + split) * rows + row
        top = tl.maximum(top, tl.load(split_lse_ptr + place, mask=row_ok, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, LATENT_PAD), 0.0, tl.float32)
    for split in range(0, splits):
        place = (batch * splits + split) * rows + row
        share = tl.exp(tl.load(split_lse_ptr + place, mask=row_ok, other=float("-inf")) - base)
        part = tl.load(part_ptr + place[:, None] * LATENT + latent[None, :], mask=ok, other=0.0)
        total += share
        acc += share[:, None] * part
    empty = total == 0.0
    merged = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    place = batch * rows + row
    tl.store(latent_ptr + place[:, None] * LATENT + latent[None, :], merged, mask=ok)
    tl.store(lse_ptr + place, base + tl.log(total), mask=row_ok)


def mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c_kv: torch.Tensor,
    k_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """q_nope [B, H, Sq, d_h], q_pe [B, H, Sq, d_r], c_kv [B, Sk, d_c], k_pe [B, Sk, d_r], w_uk [H, d_h, d_c],
    w_uv [H, d_v, d_c], of one dtype (float32, float16, bfloat16), any strides; d_c up to 512, d_r up to 256.

    Returns out [B, H, Sq, d_v] in the inputs' dtype, and with `return_lse` also ln sum e^S, float32 [B, H, Sq].
    `scale` defaults to 1/sqrt(d_h + d_r). `is_causal` aligns at the bottom right; a row that sees no key gives 0 and
    -inf. Raises ValueError for other shapes, TypeError for other dtypes, NotImplementedError for bfloat16 where it
    would have to be interpreted and cannot be.
    """
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "c_kv": c_kv, "k_pe": k_pe, "w_uk": w_uk, "w_uv": w_uv}
    _validate(tensors)
    batch, heads, queries, d_h = q_nope.shape
    (keys, d_c), d_r, d_v = c_kv.shape[1:], q_pe.shape[3], w_uv.shape[1]
    device, rows = q_nope.device, heads * queries
    out = torch.empty((batch, heads, queries, d_v), dtype=q_nope.dtype, device=device)
    lse = torch.full((batch, heads, queries), float("-inf"), dtype=torch.float32, device=device)
    if not keys:
        out.zero_()
    if lse.numel() and keys:
        splits = min(MOST_SPLITS, triton.cdiv(keys, SPLIT_KEYS))
        split_keys = triton.cdiv(triton.cdiv(keys, splits), TILE_K) * TILE_K
        q = torch.empty((batch, heads, queries, d_c), dtype=q_nope.dtype, device=device)
        _project(q_nope, w_uk, q, w_axes=("head", "in", "out"))
        part = torch.empty((batch, splits, rows, d_c), dtype=torch.float32, device=device)
        split_lse = torch.empty((batch, splits, rows), dtype=torch.float32, device=device)
        latent = torch.empty((batch, heads, queries, d_c), dtype=torch.float32, device=device)
        tiles = triton.cdiv(rows, ROWS)
        launch(split_kernel, (tiles * batch, splits), split_arguments(d_c, d_r, is_causal=is_causal) | {
            "q_ptr": q, "q_pe_ptr": q_pe, "c_ptr": c_kv, "k_pe_ptr": k_pe, "part_ptr": part, "lse_ptr": split_lse,
            "scale": (d_h + d_r) ** -0.5 if scale is None else float(scale),
            **strides_of("pe", q_pe, ("batch", "head", "row", "col")),
            **strides_of("c", c_kv, ("batch", "row", "col")), **strides_of("k_pe", k_pe, ("batch", "row", "col")),
            "rows": rows, "queries": queries, "keys": keys, "tiles": tiles, "splits": splits,
            "split_keys": split_keys,
        }, **SPLIT_OPTIONS)  # fmt: skip
        launch(merge_kernel, (tiles * batch,), {
            "part_ptr": part, "split_lse_ptr": split_lse, "latent_ptr": latent, "lse_ptr": lse,
            "rows": rows, "tiles": tiles, "splits": splits, **merge_arguments(d_c),
        })  # fmt: skip
        if d_v:
            _project(latent, w_uv, out, w_axes=("head", "out", "in"))
    return (out, lse) if return_lse else out


SPLIT_OPTIONS = {"num_warps": 8, "num_stages": 1}


def split_arguments(d_c: int, d_r: int, *, is_causal: bool) -> dict[str, object]:
    """The compile-time arguments of `split_kernel`."""
    return {
        "LATENT": d_c,
        "ROPE": d_r,
        "LATENT_PAD": padded(d_c),
        "ROPE_PAD": padded(d_r),
        "IS_CAUSAL": is_causal,
        "ROWS": ROWS,
        "TILE_K": TILE_K,
    }


def merge_arguments(d_c: int) -> dict[str, object]:
    """Those of `merge_kernel`."""
    return {"LATENT": d_c, "LATENT_PAD": padded(d_c), "ROWS": ROWS}


PROJECT_ARGUMENTS: dict[str, object] = {"ROWS": ROWS, "TILE_N": TILE_N}
"""Those of `project_kernel`."""


def project_options(*, widened: bool) -> dict[str, int]:
    """Launch options of `project_kernel`; where weights are widened to x, a second stage would spill registers."""
    return {"num_warps": 4, "num_stages": 1 if widened else 2}


def _project(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, w_axes: tuple[str, ...]) -> None:
    """x [B, H, S, inner] times w, whose axes are named, into a contiguous out [B, H, S, columns]."""
    batch, heads, rows, inner = x.shape
    columns, tiles = out.shape[3], triton.cdiv(rows, ROWS)
    launch(project_kernel, (tiles * batch * heads, triton.cdiv(columns, TILE_N)), {
        "x_ptr": x, "w_ptr": w, "out_ptr": out, **strides_of("x", x, ("batch", "head", "row", "col")),
        **strides_of("w", w, w_axes), **strides_of("out", out, ("batch", "head", "row", "")),
        "heads": heads, "rows": rows, "tiles": tiles, "inner": inner, "columns": columns,
        **PROJECT_ARGUMENTS,
    }, **project_options(widened=x.dtype != w.dtype))  # fmt: skip


def _validate(tensors: dict[str, torch.Tensor]) -> None:
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise TypeError(f"all inputs must share one dtype of {', '.join(DTYPES.values())}; got {dtypes}")
    if len({t.device for t in tensors.values()}) != 1:
        raise ValueError(f"all inputs must be on one device; got { ({t.device for t in tensors.values()}) }")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if [len(shape) for shape in shapes.values()] != [4, 4, 3, 3, 3, 3]:
        raise ValueError(f"ranks must be 4, 4, 3, 3, 3, 3; got {shapes}")
    batch, heads, queries, d_h = shapes["q_nope"]
    (_, keys, d_c), d_r, d_v = shapes["c_kv"], shapes["q_pe"][3], shapes["w_uv"][1]
    expected = {
        "q_nope": (batch, heads, queries, d_h), "q_pe": (batch, heads, queries, d_r), "c_kv": (batch, keys, d_c),
        "k_pe": (batch, keys, d_r), "w_uk": (heads, d_h, d_c), "w_uv": (heads, d_v, d_c),
    }  # fmt: skip
    wrong = [name for name, shape in expected.items() if shapes[name] != shape]
    if wrong:
        raise ValueError(f"{wrong[0]} must be {expected[wrong[0]]}; got {shapes[wrong[0]]}")
    if not 1 <= d_c <= MAX_LATENT or d_r > 256:
        raise ValueError(f"d_c must be 1 to {MAX_LATENT} and d_r up to 256; got {d_c}, {d_r}")


declare(
    mla_decode,
    {
        "op": "mla",
        "dtypes": tuple(DTYPES.values()),
        "devices": ("cpu", "cuda"),
        "contract": {"preset": "flash", "form": "absorbed", "up": "input", "splits": MOST_SPLITS},
        "conventions": {
            "causal_alignment": "bottom_right",
            "lse_base": "e",
            "empty_row": "zero",
            "empty_row_lse": "-inf",
            "masked_nan": "leaks",
        },
        "framework": "torch",
        "interpreted": True,
        "gradients": False,
        "description": "MLA decoding in Triton (interpreted on a CPU): absorbed, up to 8 splits of the keys",
    },
)
