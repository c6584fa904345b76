"""Attention of 8-bit inputs with factors, whole rows at a time, with every step replaceable.

q, k, v in e4m3 or e5m2 with float32 factors `[B, Hkv]`; products sum in float32; P times a factor is rounded to an
8-bit format for its product with v, its sum adds it unrounded; the output is bfloat16. Shapes and conventions are those
of `flash.attention`, but that a NaN in a hidden value leaks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.ops.attention.row import NAN_BEHIND
from targets.honest.describe import describe
from targets.honest.flash import Result

EIGHT_BITS = ("e4m3", "e5m2")
Factors = tuple[Tensor | None, Tensor | None, Tensor | None]


def to_e4m3(p: Tensor) -> Tensor:
    return p.to(torch.float8_e4m3fn).float()


def as_given(factors: Factors) -> Factors:
    return factors


def no_lag(scores: Tensor) -> Tensor:
    """What is subtracted from every score of a row `[B, H, Sq, 1]`: its maximum."""
    return scores.amax(-1, keepdim=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a variant or a mutant replaces. weight_scale: P's factor before its cast, taken out of the sum after it."""

    weight_scale: float = 256.0
    cast: Callable[[Tensor], Tensor] = to_e4m3
    factors: Callable[[Factors], Factors] = as_given
    shift: Callable[[Tensor], Tensor] = no_lag
    normalise_first: bool = False


def of_query_heads(factor: Tensor | None, heads: int) -> Tensor | float:
    """`[B, Hkv]` as `[B, Hq, 1, 1]`."""
    return 1.0 if factor is None else factor.repeat_interleave(heads // factor.shape[1], 1)[..., None, None]


def kernel(steps: Steps, *, contract: dict[str, object], dtypes: tuple[str, ...] = EIGHT_BITS) -> Callable[..., Result]:
    """A target with these steps."""

    @describe("attention", dtypes=dtypes, contract=contract, conventions=dict.fromkeys(NAN_BEHIND, "leaks"))
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        scale: float | None = None, is_causal: bool = False, return_lse: bool = False,
    ) -> Result:  # fmt: skip
        heads, (rows, keys) = q.shape[1], (q.shape[2], k.shape[2])
        of_q, of_k, of_v = (of_query_heads(f, heads) for f in steps.factors((q_descale, k_descale, v_descale)))
        group = heads // k.shape[1]
        wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        alpha = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        s = (q.float() @ wide_k.mT) * of_q * of_k * alpha
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1) & is_causal
        s = s.masked_fill(hidden, -math.inf)
        top = steps.shift(s)
        top = torch.where(top == -math.inf, 0.0, top)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        whole = torch.where(total == 0, 1.0, total)
        if steps.normalise_first:
            out = steps.cast(p / whole * steps.weight_scale) @ wide_v / steps.weight_scale
        else:
            out = steps.cast(p * steps.weight_scale) @ wide_v / (whole * steps.weight_scale)
        out = (out * of_v).to(torch.bfloat16)
        return (out, (top + total.log())[..., 0]) if return_lse else out

    return attention


def kept(p: Tensor) -> Tensor:
    return p


CONTRACT: dict[str, object] = {"preset": "flash", "weights": "e4m3", "weight_scale": 256.0, "output": "bf16"}
UNSCALED = {**CONTRACT, "weight_scale": 1.0}
attention = kernel(Steps(), contract=CONTRACT)
unscaled = kernel(Steps(weight_scale=1.0), contract=UNSCALED)
normalised = kernel(Steps(normalise_first=True), contract={**CONTRACT, "normalised_p": True})
in_float32 = kernel(Steps(cast=kept), contract={"preset": "fp32"})
