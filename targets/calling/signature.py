"""Which op a function is and how it takes the op's arguments: read from its parameters, never guessed past them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ALIASES: dict[str, tuple[str, ...]] = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "is_causal": ("causal",),
    "scale": ("sm_scale", "softmax_scale"),
    "attn_mask": ("mask",),
    "positions": ("position_ids",),
    "window_size": ("window",),
    "softcap": ("logits_soft_cap",),
    "sinks": ("sink", "s_aux"),
    "q_descale": ("descale_q",),
    "k_descale": ("descale_k",),
    "v_descale": ("descale_v",),
    "block_table": ("block_tables", "page_table"),
    "y": ("output",),
    "dy": ("grad_output", "grad"),
    "x": ("input", "logits", "scores"),
}
# Parameters that identify each op, most specific first.
SIGNATURES: tuple[tuple[str, frozenset[str]], ...] = (
    ("mla_backward", frozenset({"q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv", "do"})),
    ("mla", frozenset({"q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv"})),
    ("attention_backward", frozenset({"q", "k", "v", "do"})),
    ("attention_varlen", frozenset({"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"})),
    ("attention_paged", frozenset({"q", "k_cache", "v_cache", "block_table", "cache_seqlens"})),
    ("attention", frozenset({"q", "k", "v"})),
    ("mla_block", frozenset({"x", "positions", "w_dkv", "w_uk", "w_uv", "w_kr", "w_dq", "w_uq", "w_qr", "w_o"})),
    ("gqa_block", frozenset({"x", "w_q", "w_k", "w_v", "w_o", "cos", "sin"})),
    ("rope_apply", frozenset({"x", "cos", "sin"})),
    ("rope", frozenset({"x", "positions"})),
    ("rope_backward", frozenset({"dy", "positions"})),
    ("softmax_backward", frozenset({"y", "dy"})),
)
UNARY = ("softmax", "log_softmax", "logsumexp")
INPUTS: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v"),
    "attention_backward": ("q", "k", "v", "do"),
    "attention_varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "attention_paged": ("q", "k_cache", "v_cache", "block_table", "cache_seqlens"),
    "mla": ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv"),
    "mla_backward": ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv", "do"),
    "mla_block": ("x", "positions", "w_dkv", "w_uk", "w_uv", "w_kr", "w_dq", "w_uq", "w_qr", "w_o"),
    "gqa_block": ("x", "w_q", "w_k", "w_v", "w_o", "cos", "sin"),
    "rope": ("x", "positions"),
    "rope_backward": ("dy", "positions"),
    "rope_apply": ("x", "cos", "sin"),
    "softmax": ("x",),
    "softmax_backward": ("y", "dy"),
    "log_softmax": ("x",),
    "logsumexp": ("x",),
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "attention": ("out", "lse"),
    "attention_backward": ("dq", "dk", "dv", "dbias", "dsinks"),
    "attention_varlen": ("out", "lse"),
    "attention_paged": ("out", "lse"),
    "mla": ("out", "lse"),
    "rope_backward": ("dx",),
    "softmax_backward": ("dx",),
    "mla_backward": ("dq_nope", "dq_pe", "dc_kv", "dk_pe", "dw_uk", "dw_uv"),
}
_ATTENTION = frozenset({"scale", "is_causal", "attn_mask", "window_size", "softcap", "alibi_slopes", "sinks"})
OPTIONS: dict[str, frozenset[str]] = {
    "attention": _ATTENTION | {"return_lse", "q_descale", "k_descale", "v_descale"},
    "attention_backward": _ATTENTION,
    "attention_varlen": (_ATTENTION - {"attn_mask"}) | {"return_lse"},
    "attention_paged": (_ATTENTION - {"attn_mask"}) | {"return_lse"},
    "mla": frozenset({"scale", "is_causal", "return_lse"}),
    "mla_backward": frozenset({"scale", "is_causal"}),
    "mla_block": frozenset({"base", "layout", "scaling", "scale", "norm_kv", "norm_q", "eps", "num_heads"}),
    "gqa_block": frozenset({"num_heads", "num_kv_heads"}),
    "rope": frozenset({"base", "layout", "rotary_dim", "scaling"}),
    "rope_backward": frozenset({"base", "layout", "rotary_dim", "scaling"}),
    "rope_apply": frozenset({"layout"}),
    "softmax": frozenset(),
    "softmax_backward": frozenset(),
    "log_softmax": frozenset(),
    "logsumexp": frozenset(),
}
EXTRAS: dict[str, frozenset[str]] = {
    "attention": frozenset({"dropout_p", "seed", "training", "num_splits"}),
    "attention_varlen": frozenset({"max_seqlen_q", "max_seqlen_k"}),
}
"""Parameters that are no options of the op: what it means does not depend on them, or they follow from its inputs."""
_CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}


class BadTarget(ValueError):
    """A function that cannot be a target; one line that names the parameter and the candidates."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An op and how a function takes it: canonical name -> own keyword (None: by position), in its own order."""

    op: str
    parameters: dict[str, str | None]
    required: frozenset[str]


def read(function: Callable[..., Any], spec: str, *, op: str | None = None, name: str = "") -> Reading:
    """The reading of ``function`` as ``op``, or as what its parameters (and ``name``, if unary) say; else BadTarget."""
    signature = _signature(function)
    if signature is None or _is_opaque(signature):
        if op is None:
            raise BadTarget(f"{spec} has no parameters that say its op; name it with --op: {', '.join(INPUTS)}")
        by_name = signature is not None and not _has(signature, inspect.Parameter.VAR_POSITIONAL)
        return Reading(op, {n: n if by_name else None for n in INPUTS[op]}, frozenset(INPUTS[op]))
    own = _own_parameters(signature, spec)
    guessed = op is None
    op = op or _guess(own, name, spec)
    own = _by_position(own, op, signature, spec)
    known = {*INPUTS[op], *OPTIONS[op], *EXTRAS.get(op, ())}
    required = frozenset(n for n, p in own.items() if p.default is inspect.Parameter.empty)
    strange = sorted(n for n in required if n not in known)
    if strange:
        because = f"{spec} looks like {op}, but" if guessed else f"{spec}:"
        others = ", ".join(o for o in INPUTS if o != op)
        raise BadTarget(
            f"{because} its required parameter {strange[0]!r} is unknown; {op} knows {', '.join(sorted(known))}; "
            f"other ops for --op: {others}"
        )
    taken = {n: None if p.kind is p.POSITIONAL_ONLY else p.name for n, p in own.items() if n in known}
    return Reading(op, taken, required)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(function)
        # A torch module, compiled or not, is called through a wrapper of any arguments; what it takes stands in
        # `forward`.
        inside = getattr(function, "_orig_mod", function)
        forward = getattr(inside, "forward", None)
        return inspect.signature(forward) if forward is not None and _is_opaque(signature) else signature
    except (TypeError, ValueError):
        return None


def _is_opaque(signature: inspect.Signature) -> bool:
    kinds = {p.kind for p in signature.parameters.values()}
    return bool(kinds) and kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _has(signature: inspect.Signature, kind: Any) -> bool:
    return any(p.kind == kind for p in signature.parameters.values())


def _own_parameters(signature: inspect.Signature, spec: str) -> dict[str, inspect.Parameter]:
    own: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        # **kwargs declares nothing: an option that a target takes has a name.
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = _CANONICAL.get(parameter.name, parameter.name)
        if name in own:
            raise BadTarget(f"{spec}: parameters {own[name].name!r} and {parameter.name!r} both mean {name}")
        own[name] = parameter
    return own


def _guess(own: dict[str, inspect.Parameter], name: str, spec: str) -> str:
    op = next((candidate for candidate, needed in SIGNATURES if needed <= set(own)), None)
    required = [n for n, p in own.items() if p.default is inspect.Parameter.empty]
    if op is None and own and (len(required) <= 1 or required[0] == "x"):
        op = next((unary for unary in sorted(UNARY, key=len, reverse=True) if unary in name), None)
    if op is None:
        names = ", ".join(p.name for p in own.values())
        raise BadTarget(f"{spec}({names}) fits no op; name one with --op: {', '.join(INPUTS)}")
    return op


def _by_position(
    own: dict[str, inspect.Parameter], op: str, signature: inspect.Signature, spec: str
) -> dict[str, inspect.Parameter]:
    """``own`` with parameters of other names standing for the op's inputs, in the op's order."""
    inputs = INPUTS[op]
    missing = [n for n in inputs if n not in own]
    if not missing:
        return own
    rest = next((p for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    if rest is None and _has(signature, inspect.Parameter.VAR_KEYWORD):
        return own | {n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in missing}
    positional = [n for n, p in own.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    lacking = rest is None and len(positional) < len(inputs)
    # A name of the op at another place would be given another input's array.
    misplaced = [n for n, place in zip(positional, inputs, strict=False) if n in inputs and n != place]
    if lacking or misplaced:
        held = ", ".join(p.name for p in own.values()) or "none"
        raise BadTarget(f"{spec}: op {op} needs a parameter {missing[0]!r}; it has {held}")
    renamed = dict(zip(positional, inputs, strict=False))
    by_position = {renamed.get(n, n): p for n, p in own.items()}
    if rest is None:
        return by_position
    # With *args all inputs go by position.
    kinds = {n: inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in inputs}
    return kinds | {n: p for n, p in by_position.items() if n not in kinds}
