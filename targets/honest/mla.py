"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the core, in both evaluation
orders.

Shapes: q_nope `[B, H, Sq, d_h]`, q_pe `[B, H, Sq, d_r]`, c_kv `[B, Sk, d_c]`, k_pe `[B, Sk, d_r]` shared by
all heads, w_uk `[H, d_h, d_c]`, w_uv `[H, d_v, d_c]`; output `[B, H, Sq, d_v]`, LSE `[B, H, Sq]`.

`materialised` builds keys W_UK c and values W_UV c per head and attends as usual. `absorbed` moves W_UK into
the query and applies W_UV after the weighted sum of latents, so that decoding reads the latents alone:
multi-query attention with one KV head of width d_c + d_r. Both projections stay in float32; P is cast to the
input dtype (contract `flash`). The content and the rotary part meet in one dot product. Conventions: those of
`flash.attention`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import describe


def scale_of(given: float | None, content_dim: int, rotary_dim: int) -> float:
    return 1.0 / math.sqrt(content_dim + rotary_dim) if given is None else given


def per_head(k_pe: Tensor, heads: int) -> Tensor:
    """`[B, H, Sk, d_r]`: every head reads the same rotary key."""
    return k_pe[:, None].expand(-1, heads, -1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a mutant replaces."""

    scale_of: Callable[[float | None, int, int], float] = scale_of
    per_head: Callable[[Tensor, int], Tensor] = per_head


HONEST = Steps()


def materialised_kernel(steps: Steps = HONEST) -> Callable[..., flash.Result]:
    """A target that attends to materialised keys and values with these steps."""

    @describe("mla", contract={"preset": "flash", "form": "materialised"})
    def mla(
        q_nope: Tensor,
        q_pe: Tensor,
        c_kv: Tensor,
        k_pe: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        return_lse: bool = False,
    ) -> flash.Result:
        wide = flash.compute_dtype(c_kv.dtype)
        latent = c_kv.to(wide)[:, None]
        q = torch.cat((q_nope, q_pe), -1).to(wide)
        k = torch.cat((latent @ w_uk.to(wide).mT, steps.per_head(k_pe, q.shape[1]).to(wide)), -1)
        v = latent @ w_uv.to(wide).mT
        alpha = steps.scale_of(scale, q_nope.shape[-1], q_pe.shape[-1])
        problem = flash.prepare(q, k, v, flash.HONEST, alpha, is_causal, None)
        out, log = flash.attend(problem, flash.HONEST, c_kv.dtype)
        out = out.to(c_kv.dtype)
        return (out, log) if return_lse else out

    return mla


materialised = materialised_kernel()


@describe("mla", contract={"preset": "flash", "form": "absorbed"})
def absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
) -> flash.Result:
    wide = flash.compute_dtype(c_kv.dtype)
    q = torch.cat((q_nope.to(wide) @ w_uk.to(wide), q_pe.to(wide)), -1)
    k = torch.cat((c_kv, k_pe), -1)[:, None]
    alpha = scale_of(scale, q_nope.shape[-1], q_pe.shape[-1])
    problem = flash.prepare(q, k, c_kv[:, None], flash.HONEST, alpha, is_causal, None)
    latent, log = flash.attend(problem, flash.HONEST, c_kv.dtype)
    out = (latent @ w_uv.to(wide).mT).to(c_kv.dtype)
    return (out, log) if return_lse else out
