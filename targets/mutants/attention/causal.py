"""The causal rule: its alignment, and the paths that forget it."""

import torch
from torch import Tensor

from targets.honest import flash
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import FUTURE, UNEQUAL, one_head
from targets.mutants.mutant import mutant


def from_the_first_key(rows: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(rows)[:, None]


causal_top_left = mutant(
    "attention",
    "P4",
    "The causal mask is aligned to the first key, though the kernel declares bottom-right.",
    reports="Confirmed in a reference implementation: onnx/onnx#7297. Reported: NVIDIA/cutlass#2336.",
    smallest=UNEQUAL,
)(kernel(Steps(causal=from_the_first_key)))


causal_bottom_right = mutant(
    "attention",
    "P4",
    "The causal mask is aligned to the last key, though the kernel declares top-left.",
    smallest=UNEQUAL,
)(kernel(conventions={"causal_alignment": "top_left"}))


def one_too_many(rows: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows) + 1


causal_sees_next_key = mutant(
    "attention",
    "P4",
    "The causal mask lets each query see one key of the future.",
    smallest=FUTURE,
)(kernel(Steps(causal=one_too_many)))


def everything(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


causal_ignored = mutant(
    "attention",
    "P17",
    "`is_causal` is accepted and changes nothing.",
    reports="Reported: jax-ml/jax#19237.",
    smallest=FUTURE,
)(kernel(Steps(causal=everything)))


def only_with_a_tail(rows: int, keys: int) -> Tensor:
    visible = flash.causal(rows, keys)
    return visible if keys % flash.TILE else torch.ones_like(visible)


causal_dropped_on_full_tiles = mutant(
    "attention",
    "P18",
    "When the keys fill their tiles exactly, no tile needs a bounds check, and the causal mask goes with it.",
    reports="Reported: bledden/triton-msl#7.",
    smallest=one_head([[0.0]] * 32, [[0.0]] * 32, [[0.0]] + [[1.0]] * 31, is_causal=True),
)(kernel(Steps(causal=only_with_a_tail)))


@mutant(
    "attention",
    "P4",
    "The path that also returns the LSE forgets the causal mask.",
    reports="Confirmed, for the path that returns scores: keras-team/keras#23038.",
    smallest=FUTURE,
)
def causal_dropped_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    kept = is_causal and not return_lse
    return flash.attention(q, k, v, scale=scale, is_causal=kept, attn_mask=attn_mask, return_lse=return_lse)
