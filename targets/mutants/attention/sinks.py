"""Sinks: which heads, splits and paths know them."""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Steps, compute_dtype, kernel
from targets.mutants.attention.inputs import ONE, ONE_SINK, TWO_KEYS, ZERO, heads, one_head
from targets.mutants.mutant import mutant

sinks_ignored = mutant(
    "attention",
    "P17",
    "Sinks are accepted and dropped.",
    reports="Reported: NVIDIA/TransformerEngine#3551.",
    smallest=ONE_SINK,
)(kernel(Steps(sink_in=lambda split: False)))


def first(sinks: Tensor, alpha: float) -> Tensor:
    return sinks[:1].expand(len(sinks))


sinks_of_head_zero = mutant(
    "attention",
    "P13",
    "All heads use the sink of head 0.",
    smallest=heads(2, 2, sinks=torch.tensor([0.0, 4.0])),
)(kernel(Steps(sink_of=first)))


def scaled(sinks: Tensor, alpha: float) -> Tensor:
    return sinks.to(compute_dtype(sinks.dtype)) * alpha


sink_scaled = mutant(
    "attention",
    "P5",
    "The sink is multiplied by the scale, as scores are.",
    reports="Reported: ROCm/rocm-libraries#12229.",
    smallest=one_head([[0.0] * 4], [[0.0] * 4], ONE, scale=None, sinks=torch.tensor([2.0])),
)(kernel(Steps(sink_of=scaled)))


sink_in_every_split = mutant(
    "attention",
    "P5",
    "Each of two splits of the keys counts the sink.",
    reports="Reported: ROCm/rocm-libraries#12229.",
    smallest=one_head(ZERO, *TWO_KEYS, sinks=torch.zeros(1)),
)(kernel(Steps(splits=2, sink_in=lambda split: True), contract={"preset": "flash", "splits": 2}))


@mutant(
    "attention",
    "P17",
    "The path with a window knows no sinks.",
    reports="Reported: sgl-project/sglang#11634.",
    smallest=one_head(ZERO, ZERO, ONE, sinks=torch.zeros(1), window_size=(0, 0)),
)
def sink_dropped_with_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window_size: flash.Window | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    return flash.attention(
        q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask,
        window_size=window_size, sinks=sinks if window_size is None else None, return_lse=return_lse,
    )  # fmt: skip


@mutant(
    "attention",
    "P10",
    "The kernel for a single query knows no sinks.",
    reports="Reported: ml-explore/mlx#3452.",
    smallest=ONE_SINK,
)
def sink_ignored_in_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    return flash.attention(
        q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask,
        sinks=None if q.shape[2] == 1 else sinks, return_lse=return_lse,
    )  # fmt: skip
