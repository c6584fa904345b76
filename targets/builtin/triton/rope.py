"""Rotary position embedding in Triton: angle, table and rotation in float32, the output rounded once.

Su et al., "RoFormer" (arXiv 2104.09864), equation 34: pair i of a row at position m turns by m theta_i,
theta_i = base^(-2i/d), i = 0..d/2-1. The frequencies are made once per call on the host in float64 and
rounded to float32; m theta_i is a float32 product, so that beyond m of about 1e6 (base 1e4) the fast pairs
turn by an angle that is visibly off, from 1.6e7 by a radian. That is the common recipe, `fp32_angle`. Scaled
frequencies and their magnitude, which multiplies cos and sin, come from the host too; three positions (M-RoPE) are
NotImplemented. `rope_backward` is the same kernel with the sign of sin changed.

On a GPU cos and sin come from CUDA's libdevice, which reduces large arguments properly.
"""

import torch
import triton
import triton.language as tl

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies
from targets.builtin.rope_frequencies import length_of, magnitude
from targets.builtin.triton.interpreter import launch
from targets.calling.declare import declare

TILE = 64
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def rope_kernel(
    x_ptr, positions_ptr, frequencies_ptr, out_ptr,
    x_batch, x_head, x_row, x_col, positions_batch, positions_row,
    heads, rows, tiles, cos_size, sin_size,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one tile of rows of one head. Strides are in elements; out is contiguous."""
    program = tl.program_id(0)
    sequence = (program // tiles).to(tl.int64)
    batch = sequence // heads
    head = sequence % heads
    row = ((program % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
    row_ok = row < rows
    x_row_at = x_ptr + batch * x_batch + head * x_head + row[:, None] * x_row
    out_row_at = out_ptr + (sequence * rows + row[:, None]) * HEAD_DIM

    pair = tl.arange(0, PAIRS_PAD)
    positions_at = positions_ptr + batch * positions_batch + row * positions_row
    position = tl.load(positions_at, mask=row_ok, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < PAIRS, other=0.0)
    angle = position[:, None] * frequency[None, :]
    cos = tl.cos(angle) * cos_size
    sin = tl.sin(angle) * sin_size

    first = pair[None, :].to(tl.int64)
    second = first + PAIRS
    if INTERLEAVED:
        first = first * 2
        second = first + 1
    ok = row_ok[:, None] & (pair[None, :] < PAIRS)
    a = tl.load(x_row_at + first * x_col, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x_row_at + second * x_col, mask=ok, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_row_at + first, (a * cos - b * sin).to(kind), mask=ok)
    tl.store(out_row_at + second, (a * sin + b * cos).to(kind), mask=ok)

    if REST_PAD > 0:  # columns that do not turn are copied as they are, never converted
        rest = 2 * PAIRS + tl.arange(0, REST_PAD)[None, :].to(tl.int64)
        rest_ok = row_ok[:, None] & (rest < HEAD_DIM)
        tl.store(out_row_at + rest, tl.load(x_row_at + rest * x_col, mask=rest_ok, other=0.0), mask=rest_ok)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: RopeParameters | None = None,
) -> torch.Tensor:
    """Rotate the first `rotary_dim` entries of every row of x by its position.

    x [B, H, S, D] of float32, float16 or bfloat16, any strides; positions int64 [S] or [B, S]. `layout`
    "half" pairs entries (i, i + rotary_dim/2), "interleaved" pairs (2i, 2i + 1); `rotary_dim` is even and
    defaults to D. Entries beyond it keep their bits. `scaling`: transformers' rope_parameters. Returns a
    contiguous tensor like x.

    Raises ValueError for other shapes, layouts or dimensions, TypeError for other dtypes, NotImplementedError
    for sections, and for bfloat16 where it would have to be interpreted and cannot be.
    """
    return turn(x, positions, base=base, layout=layout, rotary_dim=rotary_dim, scaling=scaling, sign=1.0)


def rope_backward(
    dy: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: RopeParameters | None = None,
) -> torch.Tensor:
    """The gradient dx of `rope` for dy [B, H, S, D]: rotated back. Raises as `rope` does."""
    return turn(dy, positions, base=base, layout=layout, rotary_dim=rotary_dim, scaling=scaling, sign=-1.0)


def turn(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float,
    layout: str,
    rotary_dim: int | None,
    scaling: RopeParameters | None,
    sign: float,
) -> torch.Tensor:
    """`rope`, with sin times ``sign``."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be one of {', '.join(DTYPES.values())}; got {x.dtype}")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64; got {positions.dtype}")
    if scaling is not None and scaling.get("mrope_section") is not None:
        raise NotImplementedError("mrope_section")
    if x.ndim != 4 or tuple(positions.shape) not in ((x.shape[2],), (x.shape[0], x.shape[2])):
        shapes = f"{tuple(x.shape)}, {tuple(positions.shape)}"
        raise ValueError(f"x must be [B, H, S, D], positions [S] or [B, S]; got {shapes}")
    if x.device != positions.device:
        raise ValueError(f"x and positions must be on one device; got {x.device}, {positions.device}")
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout must be 'half' or 'interleaved'; got {layout!r}")
    batch, heads, rows, head_dim = x.shape
    turned = head_dim if rotary_dim is None else rotary_dim
    if turned % 2 or not 2 <= turned <= head_dim:
        raise ValueError(f"rotary_dim must be even, from 2 to {head_dim}; got {turned}")

    out = torch.empty((batch, heads, rows, head_dim), dtype=x.dtype, device=x.device)
    if out.numel():
        each = positions.expand(batch, rows)
        tiles = triton.cdiv(rows, TILE)
        length = 0 if scaling is None else length_of(positions.cpu().numpy(), scaling)
        size = magnitude(scaling)
        arguments = rope_arguments(head_dim, turned, layout=layout) | {
            "x_ptr": x, "positions_ptr": each, "out_ptr": out,
            "frequencies_ptr": frequencies(turned, base, scaling=scaling, length=length).to(x.device),
            "x_batch": x.stride(0), "x_head": x.stride(1), "x_row": x.stride(2), "x_col": x.stride(3),
            "positions_batch": each.stride(0), "positions_row": each.stride(1),
            "heads": heads, "rows": rows, "tiles": tiles, "cos_size": size, "sin_size": sign * size,
        }  # fmt: skip
        launch(rope_kernel, (tiles * batch * heads,), arguments)
    return out


def frequencies(
    rotary_dim: int, base: float, *, scaling: RopeParameters | None = None, length: int = 0
) -> torch.Tensor:
    """base^(-2i/rotary_dim), scaled, float32 [rotary_dim/2], each rounded once from float64."""
    return torch.from_numpy(rope_frequencies.frequencies(base, rotary_dim, scaling, length)).to(torch.float32)


def rope_arguments(head_dim: int, rotary_dim: int, *, layout: str) -> dict[str, object]:
    """The compile-time arguments of `rope_kernel`."""
    rest = head_dim - rotary_dim
    return {
        "HEAD_DIM": head_dim,
        "PAIRS": rotary_dim // 2,
        "PAIRS_PAD": triton.next_power_of_2(rotary_dim // 2),
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
        "INTERLEAVED": layout == "interleaved",
        "TILE": TILE,
    }


_CLAIMS: dict[str, object] = {
    "dtypes": ("fp32", "fp16", "bf16"),
    "devices": ("cpu", "cuda"),
    "contract": "fp32_angle",
    "conventions": {},
    "framework": "torch",
    "interpreted": True,
}
declare(
    rope,
    {
        "op": "rope",
        "description": "rotary embedding in Triton (interpreted on a CPU), frequencies from float64",
        **_CLAIMS,
    },
)
declare(
    rope_backward,
    {
        "op": "rope_backward",
        "description": "gradient of the rotary embedding in Triton (interpreted on a CPU)",
        **_CLAIMS,
    },
)
