"""The gradient of a target as a target: `torch.autograd` through the function, on tensors that require it.

A function that takes q, k, v and returns an output of which torch can make gradients is also an implementation of
``attention_backward``; nothing needs to be declared. One whose output torch cannot differentiate does not support that
op, which its records say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oracle.formats import input_formats
from oracle.ops.attention.case import DESCALES
from targets.calling.signature import INPUTS, OPTIONS
from targets.calling.target import USUAL, Target

BACKWARD = {"attention": "attention_backward", "rope": "rope_backward", "mla": "mla_backward"}
"""Op -> the op of its gradient."""
SUFFIX = "_backward"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a backward op differentiates: inputs in order, the cotangent's name, options that have gradients.

    linear: the forward op is linear in its input, which the backward op therefore does not take: zeros stand for it.
    """

    inputs: tuple[str, ...]
    cotangent: str
    gradients: Mapping[str, str]
    options: Mapping[str, str]
    linear: bool = False


_KINDS = {
    "attention_backward": _Kind(
        ("q", "k", "v"), "do", {n: f"d{n}" for n in "qkv"}, {"attn_mask": "dbias", "sinks": "dsinks"}
    ),
    "rope_backward": _Kind(("x",), "dy", {"x": "dx"}, {}, linear=True),
    "mla_backward": _Kind(INPUTS["mla"], "do", {n: f"d{n}" for n in INPUTS["mla"]}, {}),
}


def gradient_of(target: Target) -> Target | None:
    """The target whose calls give the gradients of ``target``'s output; None for an op or framework without."""
    op = BACKWARD.get(target.op)
    if op is None or target.framework != "torch" or not target.gradients:
        return None
    # It is called with canonical names: what the function itself calls them is known inside.
    names = [*INPUTS[op], *(n for n in target.parameters if n in OPTIONS[op])]
    dtypes = tuple(d for d in target.dtypes if d in input_formats(op))
    if not dtypes:
        return None
    return replace(
        target,
        name=target.name + SUFFIX,
        op=op,
        dtypes=dtypes,
        function=_differentiated(target, _KINDS[op]),
        parameters={n: n for n in names},
        required=frozenset(INPUTS[op]) | (target.required & OPTIONS[op]),
        forward=target,
        counterpart=None,
    )


def with_gradients(found: list[Target], *, op: str | None = None) -> list[Target]:
    """Each target, followed by its gradient where that is a target too; only those of ``op`` if one is given.

    A gradient that stands in the list itself, under the same name, is not made a second time.
    """
    made: list[Target] = []
    named = {target.name for target in found}
    for target in found:
        gradient = gradient_of(target)
        made += [target] if gradient is None or gradient.name in named else [target, gradient]
    return [t for t in made if op in (None, t.op)]


def _differentiated(target: Target, kind: _Kind) -> Callable[..., dict[str, Any]]:
    def gradient(**given: Any) -> dict[str, Any]:
        import torch

        given |= _unasked(target, given)
        cotangent = given.pop(kind.cotangent)
        if kind.linear:
            given |= {n: torch.zeros_like(cotangent) for n in kind.inputs}
        leaves = {kind.gradients[n]: _leaf(given, n) for n in kind.inputs}
        for option, output in kind.options.items():
            if given.get(option) is not None and given[option].is_floating_point():
                leaves[output] = _leaf(given, option)
        own = target.parameters
        # In the function's own order, as positional parameters need it.
        positional = [given[n] for n, keyword in own.items() if keyword is None and n in given]
        keywords = {str(own[n]): value for n, value in given.items() if own.get(n) is not None}
        with torch.enable_grad():
            result = target.function(*positional, **keywords)
        out = _first(result)
        if not getattr(out, "requires_grad", False):
            raise NotImplementedError("torch cannot differentiate the output: it has no gradient function")
        found = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)
        return dict(zip(leaves, found, strict=True))

    return gradient


def _unasked(target: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the function requires, and the op of its gradient does not know: no LSE, factors of 1, no dropout."""
    names = [n for n in target.required if n not in given and n not in INPUTS[target.op]]
    return {n: _ones(given) if n in DESCALES else USUAL.get(n, False) for n in names}


def _ones(given: Mapping[str, Any]) -> Any:
    """[B, Hkv] float32."""
    return given["k"].new_ones(given["k"].shape[:2]).float()


def _leaf(given: dict[str, Any], name: str) -> Any:
    given[name] = given[name].detach().clone().requires_grad_()
    return given[name]


def _first(result: Any) -> Any:
    if isinstance(result, Mapping):
        return result.get("out")
    return result[0] if isinstance(result, tuple | list) and result else result
