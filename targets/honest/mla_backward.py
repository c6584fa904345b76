"""Honest gradients of mla's core, materialised: k and v are built and stored, P is recomputed from the saved L.

Inputs as in `targets.honest.mla`, and do `[B, H, Sq, d_v]`; dq_nope, dq_pe, dc_kv, dk_pe, dw_uk, dw_uv in the shapes of
their inputs. Conventions: causal masks are aligned bottom-right, a row without keys gives nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest.describe import ALL, describe
from targets.honest.softmax import widen

Gradients = tuple[Tensor, ...]


def hidden_keys(rows: int, keys: int, is_causal: bool) -> Tensor:
    """`[Sq, Sk]`, True where a key is hidden."""
    if not is_causal:
        return torch.zeros(rows, keys, dtype=torch.bool)
    return torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)


def over_heads(x: Tensor) -> Tensor:
    """Shares of heads `[B, H, ..]` added up."""
    return x.sum(1)


def whole(delta: Tensor) -> Tensor:
    return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a variant or a mutant replaces."""

    delta_from_output: bool = True
    add_heads: Callable[[Tensor], Tensor] = over_heads
    delta: Callable[[Tensor], Tensor] = whole
    rope_gradient: Callable[[Tensor], Tensor] = whole
    values_meet_latents: bool = True


def kernel(steps: Steps, *, contract: object = None, dtypes: tuple[str, ...] = ALL) -> Callable[..., Gradients]:
    """A target with these steps."""

    @describe("mla_backward", dtypes=dtypes, contract=contract)  # type: ignore[arg-type]
    def mla_backward(
        q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, do: Tensor,
        *, scale: float | None = None, is_causal: bool = False,
    ) -> Gradients:  # fmt: skip
        dtype, d_h, heads = c_kv.dtype, w_uk.shape[1], w_uk.shape[0]
        alpha = 1 / math.sqrt(d_h + q_pe.shape[-1]) if scale is None else scale
        latent, given = widen(c_kv)[:, None], widen(do)
        k_nope, v = ((latent @ widen(w).mT).to(dtype) for w in (w_uk, w_uv))
        q = widen(torch.cat([q_nope, q_pe], -1))
        k = widen(torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1, -1)], -1))
        values = widen(v)
        hidden = hidden_keys(q.shape[2], k.shape[2], is_causal)
        s = (q @ k.mT * alpha).masked_fill(hidden, -math.inf)
        top = s.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, 0.0, top)
        total = torch.exp(s - top).sum(-1, keepdim=True)
        lse = torch.where(total == 0, math.inf, top + total.log())
        p = torch.exp(s - lse)
        dp = given @ values.mT
        if steps.delta_from_output:
            out = widen((torch.where(total == 0, 0.0, torch.exp(s - top) @ values / total)).to(dtype))
            delta = (given * out).sum(-1, keepdim=True)
        else:
            delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - steps.delta(delta))
        dq, dk = ds @ k * alpha, ds.mT @ q * alpha
        dv = widen((p.mT @ given).to(dtype))
        dk_nope, dk_rope = widen(dk[..., :d_h].to(dtype)), dk[..., d_h:]
        dc = steps.add_heads(dk_nope @ widen(w_uk) + (dv @ widen(w_uv) if steps.values_meet_latents else 0))
        found = (
            dq[..., :d_h], steps.rope_gradient(dq[..., d_h:]), dc, steps.add_heads(dk_rope),
            (dk_nope.mT @ latent).sum(0), (dv.mT @ latent).sum(0),
        )  # fmt: skip
        return tuple(x.to(dtype) for x in found)

    return mla_backward


mla_backward = kernel(Steps())
delta_from_weights = kernel(Steps(delta_from_output=False))
