"""Honest blocks of multi-head latent attention: prefill in both forms, and row by row from the kept latents.

x `[B, S, E]`, positions `[S]` or `[B, S]`, w_dkv `[d_c, E]`, w_uk `[H, d_h, d_c]`, w_uv `[H, d_v, d_c]`, w_kr
`[d_r, E]`, w_dq `[d_c', E]`, w_uq `[H, d_h, d_c']`, w_qr `[H, d_r, d_c']`, w_o `[E', H d_v]` -> `[B, S, E']`, causal.
Projections, norms, rotated rows and the heads' outputs are stored in the input dtype; the core keeps float32 but for P.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.honest import mla
from targets.honest.describe import ALL, describe
from targets.honest.gqa_block import linear
from targets.honest.softmax import widen

Core = Callable[..., Any]
Rotate = Callable[..., Tensor]
"""Rows, their positions and `Turn` to rotated rows."""


def normalise(c: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    if gain is None:
        return c
    wide = widen(c)
    bare = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (bare * widen(gain)).to(c.dtype)


@dataclass(frozen=True, slots=True)
class Turn:
    """How rows are rotated."""

    base: float
    layout: str
    scaling: RopeParameters | None


def rotate(x: Tensor, positions: Tensor, how: Turn) -> Tensor:
    """x `[.., S, d_r]`, angles in the dtype that x is widened to, rounded once."""
    wide, layout = widen(x), how.layout
    half = x.shape[-1] // 2
    theta = rules.frequencies(how.base, 2 * half, how.scaling, rules.length_of(positions, how.scaling), wide.dtype)
    size = rules.magnitude(how.scaling)
    angle = positions.to(wide.dtype)[..., None] * theta
    angle = angle.unsqueeze(-3) if x.ndim > angle.ndim and positions.ndim == 2 else angle
    cos, sin = angle.cos() * size, angle.sin() * size
    if layout == "half":
        first, second = wide[..., :half], wide[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    first, second = wide[..., ::2], wide[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)


def scale_of(given: float | None, content: int, rotary: int, scaling: RopeParameters | None) -> float:
    """The given scale, or 1/sqrt(d_h + d_r) times what DeepSeek's code multiplies it by."""
    return float((content + rotary) ** -0.5 * rules.softmax_factor(scaling)) if given is None else given


def as_stored(c: Tensor) -> Tensor:
    return c


def row_by_row(core: Core) -> Core:
    """Every row alone, from the latents up to its own."""

    def decode(
        q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor,
        *, scale: float | None, is_causal: bool,
    ) -> Tensor:  # fmt: skip
        rows = []
        for i in range(c_kv.shape[1]):
            query = (q_nope[:, :, i : i + 1], q_pe[:, :, i : i + 1])
            rows.append(core(*query, c_kv[:, : i + 1], k_pe[:, : i + 1], w_uk, w_uv, scale=scale))
        return torch.cat(rows, 2)

    return decode


def in_e4m3(c: Tensor) -> Tensor:
    """Latents kept in 8 bits, every row with a factor of its own."""
    factor = widen(c).abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 448.0
    return ((widen(c) / factor).to(torch.float8_e4m3fn).to(factor.dtype) * factor).to(c.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a variant or a mutant replaces."""

    core: Core = mla.materialised
    rotate_key: Rotate = rotate
    rotate_query: Rotate = rotate
    scale: Callable[[float | None, int, int, RopeParameters | None], float] = scale_of
    normalise: Callable[[Tensor, Tensor | None, float], Tensor] = normalise
    keep: Callable[[Tensor], Tensor] = as_stored


def block(steps: Steps, *, contract: dict[str, object], dtypes: tuple[str, ...] = ALL[1:]) -> Callable[..., Tensor]:
    """A target with these steps."""

    @describe("mla_block", contract=contract, dtypes=dtypes)
    def mla_block(
        x: Tensor, positions: Tensor, w_dkv: Tensor, w_uk: Tensor, w_uv: Tensor, w_kr: Tensor, w_dq: Tensor,
        w_uq: Tensor, w_qr: Tensor, w_o: Tensor, *, base: float = 10000.0, layout: str = "half",
        scaling: RopeParameters | None = None, scale: float | None = None,
        norm_kv: Tensor | None = None, norm_q: Tensor | None = None, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        how = Turn(base, layout, scaling)
        c_kv = steps.keep(steps.normalise(linear(x, w_dkv), norm_kv, eps))
        k_pe = steps.rotate_key(linear(x, w_kr), positions, how)
        c_q = steps.normalise(linear(x, w_dq), norm_q, eps)[:, None]
        q_nope, q_pe = ((widen(c_q) @ widen(w).mT).to(x.dtype) for w in (w_uq, w_qr))
        q_pe = steps.rotate_query(q_pe, positions, how)
        scale = steps.scale(scale, w_uk.shape[1], w_kr.shape[0], scaling)
        out = steps.core(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale=scale, is_causal=True)
        return linear(out.transpose(1, 2).flatten(-2), w_o)

    return mla_block


MATERIALISED: dict[str, object] = {"preset": "flash", "form": "materialised"}
ABSORBED: dict[str, object] = {"preset": "flash", "form": "absorbed"}
mla_block = block(Steps(), contract=MATERIALISED)
absorbed = block(Steps(core=mla.absorbed), contract=ABSORBED)
decoded = block(Steps(core=row_by_row(mla.absorbed)), contract=ABSORBED)
kept_in_e4m3 = block(Steps(core=mla.absorbed, keep=in_e4m3), contract={**ABSORBED, "cache": "e4m3"})
