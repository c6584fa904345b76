"""The gradient of softmax and log_softmax targets at x, by `torch.autograd`, for one cotangent.

x is the only input and the cotangent no argument of these ops, so this makes no target of another op (as
`targets.calling.gradient` does) but the same target with another function: x -> dx.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oracle.formats import StoredArray
from targets.calling import frameworks
from targets.calling.target import Target


def gradient_at(target: Target, cotangent: StoredArray, device: str) -> Target:
    """``target`` with x -> dx for its function. A call raises NotImplementedError where torch cannot differentiate."""

    def gradient(x: Any) -> Any:
        if target.framework != "torch":
            raise NotImplementedError(f"{target.framework} makes no gradients")
        import torch

        dy = frameworks.bridge("torch").to_native(cotangent, device)
        leaf = x.detach().clone().requires_grad_()
        own = target.parameters["x"]
        with torch.enable_grad():
            out = target.function(leaf) if own is None else target.function(**{own: leaf})
        if not getattr(out, "requires_grad", False):
            raise NotImplementedError("torch cannot differentiate the output: it has no gradient function")
        return torch.autograd.grad(out, leaf, dy)[0]

    return replace(target, function=gradient, parameters={"x": "x"}, required=frozenset({"x"}))
