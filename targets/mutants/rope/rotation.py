"""Pairs and their rotation, a partial one, and the rotation alone."""

import torch
from torch import Tensor

from targets.honest import rope as honest
from targets.mutants.mutant import mutant
from targets.mutants.rope.inputs import PARTIAL, one_token, two_entries


def always_half(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return honest.pairs(x, "half")


def join_half(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(first, second, "half")


rope_layout_ignored = mutant(
    "rope",
    "P17",
    "`layout` is accepted, and pairs are always (i, i + d/2).",
    reports=(
        "Confirmed: kvark/meganeura#38 (one layout where the model has the other). Reported: "
        "vllm-project/vllm-ascend#12820."
    ),
    smallest=one_token([1.0] * 4, 1, layout="interleaved"),
)(honest.kernel(honest.Steps(pairs=always_half, unpair=join_half)))


OTHER = {"half": "interleaved", "interleaved": "half"}


def other_pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return honest.pairs(x, OTHER[layout])


def other_join(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(first, second, OTHER[layout])


rope_layouts_swapped = mutant(
    "rope",
    "P16",
    "The names of the two layouts are exchanged.",
    smallest=one_token([1.0] * 4, 1),
)(honest.kernel(honest.Steps(pairs=other_pairs, unpair=other_join)))


def joined_backwards(first: Tensor, second: Tensor, layout: str) -> Tensor:
    return honest.unpair(second, first, layout)


rope_halves_exchanged = mutant(
    "rope",
    "P16",
    "The rotated halves are joined in the wrong order: norms and scores are right, the vectors are not.",
    smallest=one_token([1.0, 0.0], 0),
)(honest.kernel(honest.Steps(unpair=joined_backwards)))


def backwards(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return honest.rotate(first, second, cos, -sin)


rope_sine_negated = mutant(
    "rope",
    "P16",
    "The sign of sin is flipped: a rotation, but backwards. Scores between rotated vectors do not show it.",
    smallest=one_token([1.0, 1.0], 1),
)(honest.kernel(honest.Steps(rotate=backwards)))


rope_rotates_everything = mutant(
    "rope",
    "P17",
    "`rotary_dim` is accepted and the whole head is rotated.",
    reports="Reported: AI-Hypercomputer/maxtext#4742.",
    smallest=one_token([1.0] * 4, 1, rotary_dim=2),
)(honest.kernel(honest.Steps(width=lambda given, head_dim: head_dim)))


def fraction_squared(given: int | None, head_dim: int) -> int:
    return head_dim if given is None else max(given * given // head_dim // 2 * 2, 2)


rope_partial_twice = mutant(
    "rope",
    "P17",
    "The fraction of the head that is rotated is applied twice.",
    reports="Confirmed: vllm-project/vllm#30384.",
    smallest=PARTIAL,
)(honest.kernel(honest.Steps(width=fraction_squared)))


def unrounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y


rope_promotes = mutant(
    "rope",
    "P23",
    "The float32 table promotes the output: 16-bit inputs come back in float32.",
    reports="Reported: huggingface/pytorch-image-models#2794.",
    dtypes=("fp16", "bf16"),
    smallest="two entries, position 1",
)(honest.kernel(honest.Steps(output=unrounded)))


def cut(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 without its lower 16 bits is the bf16 next to it on the side of zero."""
    return (y.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


STEPS = honest.Steps(output=cut)


@mutant(
    "rope_apply",
    "P1",
    "The rotation's result is cut to 16 bits instead of being rounded: every output is biased towards zero.",
    reports="Confirmed, for bf16 multiplications: triton-lang/triton#11217.",
    dtypes=("bf16",),
    smallest=two_entries,
)
def rope_apply_truncates(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    return honest.apply(x, cos, sin, layout, STEPS)
