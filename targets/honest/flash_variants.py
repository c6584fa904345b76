"""Attention kernels that differ from `flash.attention` in one step, and stay honest."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from targets.honest import flash, flash_options
from targets.honest.describe import describe
from targets.honest.flash import Result, Steps, Window, compute_dtype, kernel

LOG2_E = math.log2(math.e)
LAG = 8.0 * math.log(2.0)


def in_base_two(log2_e: float) -> Steps:
    """The exp2 domain of GPU kernels: log2(e) is folded into the scale and all that joins scores, the LSE is in nats.

    `log2_e` is a parameter so that a kernel with a poor constant can be built.
    """

    def add_bias(tile: Tensor, bias: Tensor, alpha: float) -> Tensor:
        return tile + bias.to(tile.dtype) * log2_e

    return Steps(
        scale_of=lambda given, head_dim: flash.scale_of(given, head_dim) * log2_e,
        add_bias=add_bias,
        cap=lambda tile, size: flash_options.cap(tile, size * log2_e),
        slopes_of=lambda slopes, batch, heads: flash_options.slopes_of(slopes, batch, heads) * log2_e,
        sink_of=lambda sinks, alpha: sinks.to(compute_dtype(sinks.dtype)) * log2_e,
        weights=lambda tile, base: torch.exp2(tile - base),
        rescale=lambda old, base: torch.exp2(old - base),
        lse=lambda maximum, total: (maximum + torch.log2(total)) * math.log(2.0),
    )


def fused(tile: Tensor, base: Tensor) -> Tensor:
    """FlashAttention's weights: exp2(fma(s, log2 e, -fl(m log2 e))).

    float64 holds s log2 e exactly enough to stand for a fused multiply-add.
    """
    rounded = (base * LOG2_E).double()
    return torch.exp2((tile.double() * float(torch.tensor(LOG2_E)) - rounded).float())


def fused_rescale(old: Tensor, base: Tensor) -> Tensor:
    """Its factor takes the difference of the maxima first."""
    return torch.exp2((old - base) * LOG2_E)


def scores_of_prescaled_query(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    """Scale q first and store it in the input dtype, as kernels do that keep q in 16-bit registers."""
    return flash.scores((q * alpha).to(q.dtype), k, 1.0)


def lazy_row_max(old: Tensor, tile: Tensor) -> Tensor:
    """FlashAttention-4's trick: keep a stale maximum until it lags by more than a factor 2^8."""
    new = tile.amax(-1, keepdim=True)
    return torch.where(new - old > LAG, new, old)


def row_sum_of_rounded(total: Tensor, p: Tensor, rounded: Tensor) -> Tensor:
    return total + rounded.to(total.dtype).sum(-1, keepdim=True)


def split(parts: int) -> Callable[..., Result]:
    return kernel(Steps(splits=parts), contract={"preset": "flash", "splits": parts})


tile_16 = kernel(Steps(tile=16))
tile_64 = kernel(Steps(tile=64))
tile_128 = kernel(Steps(tile=128))
rounded_maximum = kernel(Steps(weights=fused, rescale=fused_rescale))
exp2_domain = kernel(in_base_two(LOG2_E))
split_2 = split(2)
split_3 = split(3)
split_4 = split(4)
split_8 = split(8)
reversed_keys = kernel(Steps(right_to_left=True))
uncast_weights = kernel(Steps(cast=lambda p, dtype: p), contract="fp32")
prescaled_query = kernel(Steps(scores=scores_of_prescaled_query), contract={"preset": "flash", "qk_prescale": "input"})
lazy_rescaling = kernel(Steps(row_max=lazy_row_max), contract={"preset": "flash", "lag": LAG})
rounded_row_sum = kernel(Steps(row_sum=row_sum_of_rounded), contract={"preset": "flash", "row_sum": "rounded"})


def window_without_left(rows: int, keys: int, left: int, right: int) -> Tensor:
    """The key at distance `left` is outside."""
    seen = flash_options.window(rows, keys, -1, right)
    return seen if left < 0 else seen & (flash_options.before(rows, keys) < left)


def from_first_key(rows: int, keys: int) -> Tensor:
    """ALiBi as slope j: it differs from -slope (i - j) by a constant of the row, which the LSE alone shows."""
    return torch.arange(keys).expand(rows, keys)


@describe(
    "attention",
    conventions={
        "window_left": "excluded",
        "softcap_order": "after_mask",
        "alibi_bias": "key_index",
        "lse_sink": "excluded",
    },
)
def other_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """The other published meaning of each option."""
    steps = Steps(window=window_without_left, cap_last=True, reach=from_first_key)
    problem = flash.prepare(
        q, k, v, steps, None, False, attn_mask,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    out = flash.attend(problem, steps, q.dtype)[0].to(q.dtype)
    return (out, flash.attend(replace(problem, sink=None), steps, q.dtype)[1]) if return_lse else out


@describe("attention", contract={"preset": "flash", "splits": 8})
def splits_as_asked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    num_splits: int = 1,
    return_lse: bool = False,
) -> Result:
    """As many splits of the keys as the caller wants."""
    function = kernel(Steps(splits=num_splits))
    return function(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
