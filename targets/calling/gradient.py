"""The gradient of a target as a target: `torch.autograd` through the function, on tensors that require it.

A function that takes q, k, v and returns an output of which torch can make gradients is also an implementation of
``attention_backward``; nothing needs to be declared. One whose output torch cannot differentiate does not support that
op, which its records say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oracle.case import Case
from oracle.ops.op import Gradient, Op
from oracle.ops.table import op_named, ops
from targets.calling.target import Target

SUFFIX = "_backward"


def backward_of(op: str) -> Op | None:
    """The op of the gradient of ``op`` that needs nothing but its inputs and a cotangent; None without one."""
    return next((row for row in ops().values() if forward_of(row.name) == op), None)


def forward_of(op: str | None) -> str | None:
    """The op of which ``op`` is the gradient, unless it takes what that op returned; None without one."""
    row = ops().get(op or "")
    if (
        row is None
        or row.gradient is None
        or not set(row.inputs) - {row.gradient.cotangent} <= set(op_named(row.gradient.of).inputs)
    ):
        return None
    return row.gradient.of


def gradient_of(target: Target) -> Target | None:
    """The target whose calls give the gradients of ``target``'s output; None for an op or framework without."""
    row = backward_of(target.op)
    if row is None or row.gradient is None or target.framework != "torch" or not target.gradients:
        return None
    # It is called with canonical names: what the function itself calls them is known inside.
    names = [*row.inputs, *(n for n in target.parameters if n in row.parameters)]
    dtypes = tuple(d for d in target.dtypes if d in row.formats)
    if not dtypes:
        return None
    return replace(
        target,
        name=target.name + SUFFIX,
        op=row.name,
        dtypes=dtypes,
        function=_differentiated(target, row.gradient),
        parameters={n: n for n in names},
        required=frozenset(row.inputs) | (target.required & row.parameters),
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


def _differentiated(target: Target, wiring: Gradient) -> Callable[..., dict[str, object]]:
    def gradient(**given: Any) -> dict[str, Any]:
        import torch

        given |= _unasked(target, given)
        cotangent = given.pop(wiring.cotangent)
        # An op that is linear in its input has a gradient that does not take it: zeros stand for it.
        given |= {n: torch.zeros_like(cotangent) for n in wiring.inputs if n not in given}
        leaves = {output: _leaf(given, n) for n, output in wiring.inputs.items()}
        for option, output in wiring.options.items():
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
        if out.shape == cotangent.shape:
            # The same numbers reach the output; torch imports a system of computer algebra for a cotangent of its own.
            with torch.enable_grad():
                out, cotangent = (out * cotangent).sum(), None
        found = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)
        return dict(zip(leaves, found, strict=True))

    return gradient


def _unasked(target: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the function requires, and the op of its gradient does not know: no LSE, factors of 1, no dropout."""
    import torch

    row = target.row
    names = [n for n in target.required if n not in given and n not in row.inputs]
    # Of the arrays only shapes are read, which tensors have too.
    values = {n: row.usual_value(n, Case(row.name, given)) for n in names}
    device = next(iter(given.values())).device
    return {n: torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for n, v in values.items()}


def _leaf(given: dict[str, Any], name: str) -> Any:
    given[name] = given[name].detach().clone().requires_grad_()
    return given[name]


def _first(result: Any) -> Any:
    if isinstance(result, Mapping):
        return result.get("out")
    return result[0] if isinstance(result, tuple | list) and result else result
