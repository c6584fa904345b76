"""Which op a function is and how it takes the op's arguments: read from its parameters, never guessed past them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from oracle.ops.attention.options import TABLE
from oracle.ops.table import op_named, ops

ALIASES: dict[str, tuple[str, ...]] = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "positions": ("position_ids",),
    "block_table": ("block_tables", "page_table"),
    "y": ("output",),
    "dy": ("grad_output", "grad"),
    "x": ("input", "logits", "scores"),
    **{row.name: row.aliases for row in TABLE if row.aliases},
}
_CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}


class BadTarget(ValueError):
    """A function that cannot be a target; one line that names the parameter and the candidates."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An op and how a function takes it: canonical name -> own keyword (None: by position), in its own order."""

    op: str
    parameters: dict[str, str | None]
    required: frozenset[str]


def read(function: Callable[..., object], spec: str, *, op: str | None = None, name: str = "") -> Reading:
    """The reading of ``function`` as ``op``, or as what its parameters (and ``name``, if unary) say; else BadTarget."""
    signature = _signature(function)
    if signature is None or _is_opaque(signature):
        if op is None:
            raise BadTarget(f"{spec} has no parameters that say its op; name it with --op: {', '.join(ops())}")
        by_name = signature is not None and not _has(signature, inspect.Parameter.VAR_POSITIONAL)
        inputs = op_named(op).inputs
        return Reading(op, {n: n if by_name else None for n in inputs}, frozenset(inputs))
    own = _own_parameters(signature, spec)
    guessed = op is None
    op = op or _guess(own, name, spec)
    own = _by_position(own, op, signature, spec)
    row = op_named(op)
    known = {*row.inputs, *row.parameters, *row.extras}
    required = frozenset(n for n, p in own.items() if p.default is inspect.Parameter.empty)
    strange = sorted(n for n in required if n not in known)
    if strange:
        because = f"{spec} looks like {op}, but" if guessed else f"{spec}:"
        others = ", ".join(o for o in ops() if o != op)
        raise BadTarget(
            f"{because} its required parameter {strange[0]!r} is unknown; {op} knows {', '.join(sorted(known))}; "
            f"other ops for --op: {others}"
        )
    taken = {n: None if p.kind is p.POSITIONAL_ONLY else p.name for n, p in own.items() if n in known}
    return Reading(op, taken, required)


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
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


def _has(signature: inspect.Signature, kind: object) -> bool:
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
    # Most specific first; of ops with one input, which may be anything, the function's name tells which.
    known = sorted(ops().values(), key=lambda row: -len(row.inputs))
    op = next((row.name for row in known if len(row.inputs) > 1 and set(row.inputs) <= set(own)), None)
    required = [n for n, p in own.items() if p.default is inspect.Parameter.empty]
    if op is None and own and (len(required) <= 1 or required[0] == "x"):
        unary = sorted((row.name for row in known if len(row.inputs) == 1), key=len, reverse=True)
        op = next((candidate for candidate in unary if candidate in name), None)
    if op is None:
        names = ", ".join(p.name for p in own.values())
        raise BadTarget(f"{spec}({names}) fits no op; name one with --op: {', '.join(ops())}")
    return op


def _by_position(
    own: dict[str, inspect.Parameter], op: str, signature: inspect.Signature, spec: str
) -> dict[str, inspect.Parameter]:
    """``own`` with parameters of other names standing for the op's inputs, in the op's order."""
    inputs = op_named(op).inputs
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
