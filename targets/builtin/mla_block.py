"""The whole MLA layer of DeepSeek-V2 (arXiv 2405.04434, section 2.1), prefill and decoding from a latent cache.

    c^KV = W_DKV x    k^R = RoPE(W_KR x)    c^Q = W_DQ x    q^C = W_UQ c^Q    q^R = RoPE(W_QR c^Q)
    O = MLA(q^C, q^R, c^KV, k^R)    y = W_O O

RMSNorm on c^KV and c^Q, which DeepSeek's code has and the paper's formula has not, is done where weights for it are
given. Decoding caches c^KV, after its norm, and the rotated k^R. Every product is summed in float32 (float64 for
float64) and stored in the inputs' dtype; norms, angles and rotations are evaluated wider and rounded once; the core is
`targets.builtin.mla_torch` in either evaluation order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from oracle.ops.rope.parameters import RopeParameters
from targets.builtin import rope_frequencies_torch as rules
from targets.builtin.mla_torch import _product, mla_absorbed, mla_materialised
from targets.calling.declare import declare

Tensor = torch.Tensor
CORES = {"materialised": mla_materialised, "absorbed": mla_absorbed}


@dataclass(frozen=True, slots=True)
class Weights:
    """w_dkv [d_c, E], w_uk [H, d_h, d_c], w_uv [H, d_v, d_c], w_kr [d_r, E], w_dq [d_cq, E], w_uq [H, d_h, d_cq],
    w_qr [H, d_r, d_cq], w_o [E, H d_v]; norm_kv [d_c], norm_q [d_cq] or None."""

    w_dkv: Tensor
    w_uk: Tensor
    w_uv: Tensor
    w_kr: Tensor
    w_dq: Tensor
    w_uq: Tensor
    w_qr: Tensor
    w_o: Tensor
    norm_kv: Tensor | None = None
    norm_q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a layer is besides its weights; scale None: 1/sqrt(d_h + d_r), times YaRN's factor where scaling has one."""

    base: float
    scale: float | None = None
    eps: float = 1e-6
    form: str = "materialised"
    layout: str = "half"
    scaling: RopeParameters | None = None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.to(_wide(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, settings: Settings) -> Tensor:
    """x [B, H, S, d_r] rotated by positions [S] or [B, S]; angles are float64."""
    half, scaling = x.shape[-1] // 2, settings.scaling
    length = rules.length_of(positions, scaling)
    frequencies = rules.frequencies(settings.base, 2 * half, scaling, length, torch.float64).to(x.device)
    angle = positions.to(torch.float64)[..., None] * frequencies
    angle = angle[:, None] if angle.ndim == 3 else angle
    wide = x.to(_wide(x.dtype))
    size = rules.magnitude(scaling)
    cos, sin = (torch.cos(angle) * size).to(wide.dtype), (torch.sin(angle) * size).to(wide.dtype)
    if settings.layout == "half":
        a, b = wide[..., :half], wide[..., half:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def _scale(settings: Settings, weights: Weights) -> float | None:
    if settings.scale is not None or settings.scaling is None:
        return settings.scale
    width = weights.w_uk.shape[1] + weights.w_kr.shape[0]
    return float(width**-0.5 * rules.softmax_factor(settings.scaling))


def decode(
    x: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None, weights: Weights, settings: Settings
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(y [B, S, E], the cache with the new tokens) for x [B, S, E] that follow those of ``cache``; None: nothing yet.

    The cache is c^KV [B, T, d_c] and k^R [B, T, d_r]. Queries see all of it and the new tokens up to themselves.
    """
    latent = _normed(_product(x, weights.w_dkv.mT), weights.norm_kv, settings.eps)
    rope_key = _rotated(_product(x, weights.w_kr.mT)[:, None], positions, settings)[:, 0]
    if cache is not None:
        latent, rope_key = torch.cat((cache[0], latent), 1), torch.cat((cache[1], rope_key), 1)
    of_query = _normed(_product(x, weights.w_dq.mT), weights.norm_q, settings.eps)[:, None]
    q_nope = _product(of_query, weights.w_uq.mT)
    q_pe = _rotated(_product(of_query, weights.w_qr.mT), positions, settings)
    scale = _scale(settings, weights)
    out = CORES[settings.form](q_nope, q_pe, latent, rope_key, weights.w_uk, weights.w_uv, scale=scale, is_causal=True)
    return _product(out.transpose(1, 2).flatten(-2), weights.w_o.mT), (latent, rope_key)


def mla_block(
    x: Tensor,
    positions: Tensor,
    w_dkv: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    w_kr: Tensor,
    w_dq: Tensor,
    w_uq: Tensor,
    w_qr: Tensor,
    w_o: Tensor,
    *,
    num_heads: int | None = None,
    base: float = 10000.0,
    scale: float | None = None,
    norm_kv: Tensor | None = None,
    norm_q: Tensor | None = None,
    eps: float = 1e-6,
    form: str = "materialised",
    layout: str = "half",
    scaling: RopeParameters | None = None,
) -> Tensor:
    """Prefill: x [B, S, E], positions int64 [S] or [B, S] -> y [B, S, E], causal; weights as in `Weights`.

    ``form`` is materialised or absorbed; ``layout`` pairs the rotary entries (i, i + d_r/2) (half) or (2i, 2i + 1)
    (interleaved, as DeepSeek's). ``scaling`` holds transformers' `rope_parameters`: scaled frequencies, their
    magnitude, and with ``mscale_all_dim`` a larger scale, unless ``scale`` is given. ValueError for another form or
    layout, and where num_heads is not that of the weights.
    """
    if form not in CORES or layout not in ("half", "interleaved"):
        raise ValueError(f"form is {' or '.join(CORES)}, layout half or interleaved; got {form!r}, {layout!r}")
    if any(w.shape[0] != (num_heads or w.shape[0]) for w in (w_uk, w_uv, w_uq, w_qr)):
        raise ValueError(f"weights of {w_uk.shape[0]} heads, and num_heads is {num_heads}")
    weights = Weights(w_dkv, w_uk, w_uv, w_kr, w_dq, w_uq, w_qr, w_o, norm_kv, norm_q)
    return decode(x, positions, None, weights, Settings(base, scale, eps, form, layout, scaling))[0]


mla_block_materialised = functools.partial(mla_block, form="materialised")
mla_block_absorbed = functools.partial(mla_block, form="absorbed")

_COMMON: dict[str, object] = {"op": "mla_block", "dtypes": ("fp32", "fp16", "bf16"), "devices": ("cpu", "cuda")}
declare(
    mla_block_materialised,
    _COMMON
    | {
        "contract": {"preset": "eager", "form": "materialised"},
        "description": "MLA layer in torch, keys and values built per head, every product stored in the input dtype",
    },
)
declare(
    mla_block_absorbed,
    _COMMON
    | {
        "contract": {"preset": "eager", "form": "absorbed"},
        "description": "MLA layer in torch, projections absorbed, every product stored in the input dtype",
    },
)
