"""Backward passes of attention."""

from typing import Any

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash_backward import HONEST, BackwardSteps, Gradients, backward_kernel, gradients, scale_gradient
from targets.honest.flash_backward import attention_backward as honest
from targets.mutants.attention.precision import truncated
from targets.mutants.gradients.inputs import TWO_KEYS, grouped_backward, one_head
from targets.mutants.mutant import mutant


def uncentred(dp: Tensor, d: Tensor) -> Tensor:
    return dp


backward_delta_dropped = mutant(
    "attention_backward",
    "P14",
    "dS = P o dP: the row sums D are left out.",
    smallest=one_head(*TWO_KEYS),
)(backward_kernel(BackwardSteps(centre=uncentred)))


def first_of_group(parts: Tensor, kv_heads: int) -> Tensor:
    batch, heads, keys, width = parts.shape
    return parts.view(batch, kv_heads, heads // kv_heads, keys, width)[:, :, 0]


backward_group_not_summed = mutant(
    "attention_backward",
    "P13",
    "dK and dV of a shared KV head hold the share of the first query head of its group.",
    smallest=grouped_backward,
)(backward_kernel(BackwardSteps(gather=first_of_group)))


def unmasked(scores: Tensor, log: Tensor, hidden: Tensor) -> Tensor:
    # Where the forward pass hid a key the score is -inf: the largest of the row stands in for what it was.
    top = scores.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True).clamp(min=-1e30)
    return torch.exp(torch.where(hidden, top, scores) - log)


backward_ignores_mask = mutant(
    "attention_backward",
    "P14",
    "P is recomputed without the masks: hidden keys get gradients.",
    smallest=one_head([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[1.0]], window_size=(0, 0)),
)(backward_kernel(BackwardSteps(recompute=unmasked)))


def nothing(weight: Tensor, d: Tensor) -> Tensor:
    return torch.zeros(weight.shape[1], dtype=weight.dtype)


backward_without_sink_gradient = mutant(
    "attention_backward",
    "P17",
    "The sinks get a gradient of zero.",
    smallest=one_head([[1.0]], [[0.0]], [[1.0]], [[1.0]], sinks=torch.zeros(1)),
)(backward_kernel(BackwardSteps(sink_gradient=nothing)))


def half(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float16)


backward_ds_in_fp16 = mutant(
    "attention_backward",
    "P9",
    "dS is stored in fp16 whatever the input dtype: small gradients vanish, large ones overflow.",
    dtypes=("fp32", "bf16"),
    smallest=one_head([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[2.0**-30]]),
)(backward_kernel(BackwardSteps(cast_gradient=half)))


def identity(capped: Tensor, softcap: float) -> Tensor:
    return torch.ones_like(capped)


backward_cap_slope_dropped = mutant(
    "attention_backward",
    "P17",
    "The gradient passes the soft cap as if it were the identity.",
    smallest=one_head([[2.0]], [[0.0], [1.0]], [[0.0], [1.0]], [[1.0]], softcap=1.0),
)(backward_kernel(BackwardSteps(cap_slope=identity)))


def unscaled(x: Tensor, alpha: float) -> Tensor:
    return x


backward_key_scale_missing = mutant(
    "attention_backward",
    "P14",
    "dK is not multiplied by the scale.",
    smallest=one_head(*TWO_KEYS, scale=0.5),
)(backward_kernel(BackwardSteps(scale_key=unscaled)))


def paired(ds: Tensor) -> Tensor:
    rows = ds.shape[-2]
    kept = ds.clone()
    kept[..., rows - rows % 2 :, :] = 0.0
    return kept


backward_last_query_dropped = mutant(
    "attention_backward",
    "P18",
    "The last of an odd number of queries does not reach dK and dV.",
    smallest=one_head(*TWO_KEYS),
)(backward_kernel(BackwardSteps(queries_of=paired)))


def scaled(ds: Tensor, alpha: float) -> Tensor:
    return ds * alpha


backward_bias_gradient_scaled = mutant(
    "attention_backward",
    "P14",
    "The gradient of an additive mask is multiplied by the scale.",
    smallest=one_head(*TWO_KEYS, scale=0.5, attn_mask=torch.zeros(1, 1, 1, 2)),
)(backward_kernel(BackwardSteps(bias_gradient=scaled)))


def top_left(rows: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(rows)[:, None]


backward_causal_top_left = mutant(
    "attention_backward",
    "P14",
    "The backward pass aligns the causal mask top-left, the declared alignment is bottom-right.",
    smallest=one_head(*TWO_KEYS, is_causal=True),
)(backward_kernel(BackwardSteps(causal=top_left)))


backward_weights_truncated = mutant(
    "attention_backward",
    "G3",
    "P is truncated to the input dtype for dV, not rounded.",
    dtypes=("fp16", "bf16"),
    smallest="one query, two keys of different scores",
)(backward_kernel(BackwardSteps(cast_weights=truncated)))


def eight_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float8_e4m3fn)


backward_weights_in_e4m3 = mutant(
    "attention_backward",
    "P14",
    "P is cast to e4m3 for dV.",
    smallest=one_head([[1.0]], [[0.0]] * 3, [[0.0], [1.0], [2.0]], [[1.0]]),
)(backward_kernel(BackwardSteps(cast_weights=eight_bits)))


@mutant(
    "attention_backward",
    "P25",
    "The backward pass takes dO as ones.",
    reports="Reported: mindspore-lab/mindone#1438.",
    smallest=one_head([[1.0]], [[0.0], [0.0]], [[0.0], [1.0]], [[2.0]]),
)
def backward_ignores_cotangent(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, scale: float | None = None, is_causal: bool = False
) -> Gradients:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, None)
    return {n: g.to(q.dtype) for n, g in gradients(problem, torch.ones_like(do), k.shape[1], HONEST).items()}


@mutant(
    "attention_backward",
    "P17",
    "The gradient of the sinks is not returned at all, so that they never train.",
    reports="Confirmed: ISEEKYAN/Megatron-LM#205.",
    smallest="one query, one key, a sink",
)
def backward_returns_no_sink_gradient(
    q: Any, k: Any, v: Any, do: Any, *, scale: Any = None, is_causal: bool = False, sinks: Any = None
) -> Gradients:
    found = honest(q, k, v, do, scale=scale, is_causal=is_causal, sinks=sinks)
    return {name: gradient for name, gradient in found.items() if name != "dsinks"}


_BUFFERS: dict[tuple[int, ...], Tensor] = {}


def into_buffer(x: Tensor, alpha: float) -> Tensor:
    shape = tuple(x.shape)
    total = _BUFFERS.get(shape, torch.zeros_like(x)).to(x.dtype) + scale_gradient(x, alpha)
    _BUFFERS[shape] = total
    return total


backward_accumulates_across_calls = mutant(
    "attention_backward",
    "P15",
    "dQ is added to what an earlier call of the same shape left in its buffer.",
    smallest="any, called twice",
)(backward_kernel(BackwardSteps(scale_query=into_buffer)))
