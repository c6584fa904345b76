"""Names and values of the conventions, per op: the one table that statements are checked against.

A convention is a published choice, never a failure; contradicting the stated one is. `grouped_heads` and
`unequal_value_dim` are limits.
"""

from __future__ import annotations

from collections.abc import Mapping

from oracle.ops.attention.case import CHOICES

_SCORES = {
    "causal_alignment": CHOICES["causal_alignment"],
    "lse_base": ("e", "2"),
    "empty_row": ("zero", "nan", "mean"),
    "empty_row_lse": ("-inf", "+inf", "finite"),
    "masked_nan": ("blocked", "leaks"),
}
_ATTENTION = {
    **_SCORES,
    **CHOICES,
    "grouped_heads": ("accepted", "refused"),
    "unequal_value_dim": ("accepted", "refused"),
    "batch_invariant": ("yes", "no"),
}
CONVENTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    "attention_varlen": _ATTENTION,
    "attention_paged": {**_ATTENTION, "causal_alignment": ("bottom_right",)},
    "mla": _SCORES,
    "rope": {"layout": ("half", "interleaved")},
    "rope_backward": {"layout": ("half", "interleaved")},
    "rope_apply": {"layout": ("half", "interleaved")},
    "softmax_backward": {},
    "gqa_block": {},
    "mla_backward": {"causal_alignment": CHOICES["causal_alignment"]},
    "mla_block": {},
    "softmax": {"empty_row": ("zero", "nan", "mean")},
    "log_softmax": {"empty_row": ("zero", "nan", "mean")},
    "logsumexp": {"lse_base": ("e", "2"), "empty_row_lse": ("-inf", "+inf", "finite")},
}


def wrong_convention(op: str, name: str, value: object) -> str:
    """What is wrong with stating ``name`` = ``value``, in one line that lists the valid ones; empty if nothing is."""
    known = CONVENTIONS.get(op, {})
    if name not in known:
        return f"unknown convention {name!r} for {op}; known: {', '.join(known) or 'none'}"
    if value not in known[name]:
        return f"unknown value {value!r} of convention {name}; known: {', '.join(known[name])}"
    return ""
