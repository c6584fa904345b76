"""Honest gradients of mla's core: P is recomputed from the saved L.

Materialised, k and v are built and stored; absorbed, q~ = q^C W_UK, the latent sum z and its cotangent are.

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


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def whole(delta: Tensor) -> Tensor:
    return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a variant or a mutant replaces."""

    delta_from_output: bool = True
    add_heads: Callable[[Tensor], Tensor] = over_heads
    delta: Callable[[Tensor], Tensor] = whole
    rope_gradient: Callable[[Tensor], Tensor] = whole
    store: Callable[[Tensor, torch.dtype], Tensor] = cast
    query_gradient: Callable[[Tensor], Tensor] = whole
    values_meet_latents: bool = True


@dataclass(frozen=True, slots=True)
class Attended:
    """Gradients of attention of q `[B, H, Sq, d]`, k and v `[B, H or 1, Sk, ..]`, per head, and its output as saved."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    out: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, alpha: float, is_causal: bool, dtype: torch.dtype, steps: Steps
) -> Attended:
    hidden = hidden_keys(q.shape[2], k.shape[2], is_causal)
    s = (q @ k.mT * alpha).masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = torch.exp(s - top).sum(-1, keepdim=True)
    lse = torch.where(total == 0, math.inf, top + total.log())
    p = torch.exp(s - lse)
    dp = do @ v.mT
    out = widen(torch.where(total == 0, 0.0, torch.exp(s - top) @ v / total).to(dtype))
    delta = (do * out if steps.delta_from_output else p * dp).sum(-1, keepdim=True)
    ds = p * (dp - steps.delta(delta))
    return Attended(ds @ k * alpha, ds.mT @ q * alpha, p.mT @ do, out)


def kernel(
    steps: Steps, *, contract: object = None, dtypes: tuple[str, ...] = ALL, absorbed: bool = False
) -> Callable[..., Gradients]:
    """A target with these steps, in one of both evaluation orders."""

    @describe("mla_backward", dtypes=dtypes, contract=contract)  # type: ignore[arg-type]
    def mla_backward(
        q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, do: Tensor,
        *, scale: float | None = None, is_causal: bool = False,
    ) -> Gradients:  # fmt: skip
        alpha = 1 / math.sqrt(q_nope.shape[-1] + q_pe.shape[-1]) if scale is None else scale
        order = _absorbed if absorbed else _materialised
        found = order(q_nope, q_pe, c_kv, k_pe, widen(w_uk), widen(w_uv), widen(do), alpha, is_causal, steps)
        return tuple(x.to(c_kv.dtype) for x in found)

    return mla_backward


def _materialised(
    q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, do: Tensor,
    alpha: float, is_causal: bool, steps: Steps,
) -> Gradients:  # fmt: skip
    dtype, (heads, d_h, _), latent = c_kv.dtype, w_uk.shape, widen(c_kv)[:, None]
    k_nope, v = (steps.store(latent @ w.mT, dtype) for w in (w_uk, w_uv))
    q = widen(torch.cat([q_nope, q_pe], -1))
    k = widen(torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1, -1)], -1))
    made = attend(q, k, widen(v), do, alpha, is_causal, dtype, steps)
    dv = widen(steps.store(made.dv, dtype))
    dk_nope, dk_rope = widen(steps.store(made.dk[..., :d_h], dtype)), made.dk[..., d_h:]
    dc = steps.add_heads(dk_nope @ w_uk + (dv @ w_uv if steps.values_meet_latents else 0))
    return (
        made.dq[..., :d_h], steps.rope_gradient(made.dq[..., d_h:]), dc, steps.add_heads(dk_rope),
        (dk_nope.mT @ latent).sum(0), (dv.mT @ latent).sum(0),
    )  # fmt: skip


def _absorbed(
    q_nope: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, do: Tensor,
    alpha: float, is_causal: bool, steps: Steps,
) -> Gradients:  # fmt: skip
    dtype, d_c, latent = c_kv.dtype, c_kv.shape[-1], widen(c_kv)[:, None]
    q = torch.cat([widen(steps.store(widen(q_nope) @ w_uk, dtype)), widen(q_pe)], -1)
    k = torch.cat([latent, widen(k_pe)[:, None]], -1)
    dz = widen(steps.store(do @ w_uv, dtype))
    made = attend(q, k, latent, dz, alpha, is_causal, dtype, steps)
    dq_latent = widen(steps.store(made.dq[..., :d_c], dtype))
    dc = steps.add_heads(made.dk[..., :d_c] + (made.dv if steps.values_meet_latents else 0))
    return (
        dq_latent @ w_uk.mT, steps.rope_gradient(made.dq[..., d_c:]), dc, steps.add_heads(made.dk[..., d_c:]),
        (widen(q_nope).mT @ steps.query_gradient(dq_latent)).sum(0), (do.mT @ made.out).sum(0),
    )  # fmt: skip


mla_backward = kernel(Steps())
delta_from_weights = kernel(Steps(delta_from_output=False))
absorbed = kernel(Steps(), absorbed=True)
absorbed_delta_from_weights = kernel(Steps(delta_from_output=False), absorbed=True)
