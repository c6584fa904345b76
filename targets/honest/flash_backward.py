"""FlashAttention's backward pass in plain torch on a CPU, with every step replaceable.

Dao (arXiv 2307.08691, algorithm 2), whole rows at a time: P is recomputed from the LSE, D = rowsum(dO o O) from the
output as it is saved, P and dS are cast to the input dtype where they meet another operand; sums are float32. The
gradients of a shared KV head add up in float32 over its query heads before they are rounded.

Shapes: q, dq `[B, Hq, Sq, D]`, k, dk `[B, Hkv, Sk, D]`, v, dv `[B, Hkv, Sk, Dv]`, do `[B, Hq, Sq, Dv]`; inside, scores
and dS are `[B, Hq, Sq, Sk]`. Causal masks are aligned bottom-right; a row without keys gives no gradient.

`BackwardSteps` names each decision once; an honest variant or a mutant replaces one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.describe import UP_TO_32_BITS, describe
from targets.honest.flash import Window

Gradients = dict[str, Tensor]


def recompute(scores: Tensor, log: Tensor, hidden: Tensor) -> Tensor:
    """P from the scores and the LSE `[B, Hq, Sq, 1]`; 0 where a query may not attend."""
    return torch.exp(scores - log).masked_fill(hidden, 0.0)


def delta(do: Tensor, out: Tensor, p: Tensor, dp: Tensor) -> Tensor:
    return (do * out).sum(-1, keepdim=True)


def centre(dp: Tensor, d: Tensor) -> Tensor:
    return dp - d


def cap_slope(capped: Tensor, softcap: float) -> Tensor:
    return 1 - (capped / softcap) ** 2


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def gather(parts: Tensor, kv_heads: int) -> Tensor:
    """`[B, Hq, Sk, D]` per query head to `[B, Hkv, Sk, D]`: the sum over each group."""
    batch, heads, keys, width = parts.shape
    return parts.view(batch, kv_heads, heads // kv_heads, keys, width).sum(2)


def scale_gradient(x: Tensor, alpha: float) -> Tensor:
    return x * alpha


def queries_of(ds: Tensor) -> Tensor:
    """The rows of dS, or of P, that reach dK, or dV."""
    return ds


def bias_gradient(ds: Tensor, alpha: float) -> Tensor:
    return ds


def sink_gradient(weight: Tensor, d: Tensor) -> Tensor:
    """`[Hq]` from the sink's weights and D `[B, Hq, Sq, 1]`."""
    return -(weight * d).sum((0, 2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSteps:
    """Every decision of the backward pass; a default is what an honest one does."""

    causal: Callable[[int, int], Tensor] = flash.causal
    recompute: Callable[[Tensor, Tensor, Tensor], Tensor] = recompute
    delta: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = delta
    centre: Callable[[Tensor, Tensor], Tensor] = centre
    cap_slope: Callable[[Tensor, float], Tensor] = cap_slope
    cast_weights: Callable[[Tensor, torch.dtype], Tensor] = cast
    cast_gradient: Callable[[Tensor, torch.dtype], Tensor] = cast
    gather: Callable[[Tensor, int], Tensor] = gather
    scale_query: Callable[[Tensor, float], Tensor] = scale_gradient
    scale_key: Callable[[Tensor, float], Tensor] = scale_gradient
    queries_of: Callable[[Tensor], Tensor] = queries_of
    bias_gradient: Callable[[Tensor, float], Tensor] = bias_gradient
    sink_gradient: Callable[[Tensor, Tensor], Tensor] = sink_gradient


HONEST = BackwardSteps()


def _scores(problem: flash.Problem) -> tuple[Tensor, Tensor | None, Tensor]:
    """(scores, capped scores before bias and ALiBi or None, hidden), all `[B, Hq, Sq, Sk]`."""
    whole = slice(0, problem.k.shape[-2])
    tile, seen = problem.scores(flash.HONEST, whole)
    hidden = torch.zeros(tile.shape, dtype=torch.bool)
    for mask in seen:
        hidden = hidden | ~mask
    capped = None
    if problem.softcap is not None:
        capped = flash.HONEST.cap(flash.HONEST.scores(problem.q, problem.k, problem.alpha), problem.softcap)
    return tile, capped, hidden


def gradients(problem: flash.Problem, do: Tensor, kv_heads: int, steps: BackwardSteps) -> Gradients:
    """All gradients, unrounded; the forward pass runs first and saves O in the input dtype and the LSE."""
    dtype, wide = problem.q.dtype, flash.compute_dtype(problem.q.dtype)
    out, log = flash.attend(problem, flash.HONEST, dtype)
    saved, do = out.to(dtype).to(wide), do.to(wide)
    q, k, v = (x.to(wide) for x in (problem.q, problem.k, problem.v))
    log = torch.where(log == -torch.inf, 0.0, log)[..., None]
    scores, capped, hidden = _scores(problem)
    p = steps.recompute(scores, log, hidden)
    dv = steps.queries_of(steps.cast_weights(p, dtype).to(wide)).mT @ do
    dp = do @ v.mT
    d = steps.delta(do, saved, p, dp)
    ds = p * steps.centre(dp, d)
    dx = ds if capped is None or problem.softcap is None else ds * steps.cap_slope(capped, problem.softcap)
    low = steps.cast_gradient(dx, dtype).to(wide)
    dq = steps.scale_query(low @ k, problem.alpha)
    dk = steps.scale_key(steps.queries_of(low).mT @ q, problem.alpha)
    found = {"dq": dq, "dk": steps.gather(dk, kv_heads), "dv": steps.gather(dv, kv_heads)}
    if problem.bias is not None:
        found["dbias"] = steps.bias_gradient(ds, problem.alpha)
    if problem.sink is not None:
        weight = torch.exp(problem.sink.to(wide)[:, None, None] - log)
        found["dsinks"] = steps.sink_gradient(weight, d)
    return found


def backward_kernel(
    steps: BackwardSteps = HONEST,
    *,
    dtypes: tuple[str, ...] = UP_TO_32_BITS,
    contract: str | dict[str, object] | None = None,
) -> Callable[..., Gradients]:
    """A target function with these steps; the rest describes it (`describe`)."""

    @describe("attention_backward", dtypes=dtypes, contract=contract)
    def attention_backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        window_size: Window | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Gradients:
        problem = flash.prepare(
            q, k, v, flash.Steps(causal=steps.causal), scale, is_causal, attn_mask,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
        found = gradients(problem, do, k.shape[1], steps)
        if attn_mask is not None and "dbias" in found:
            found["dbias"] = found["dbias"].sum_to_size(attn_mask.shape)
        return {n: g.to(sinks.dtype if n == "dsinks" and sinks is not None else q.dtype) for n, g in found.items()}

    return attention_backward


attention_backward = backward_kernel(dtypes=("fp64", *UP_TO_32_BITS))
