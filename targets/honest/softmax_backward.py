"""Honest backward passes of softmax: dx from the stored y and dy `[..., n]`, the sum in float32.

fp64 inputs are reduced in float64.
"""

from torch import Tensor

from targets.honest.describe import ALL, describe
from targets.honest.softmax import widen


@describe("softmax_backward", dtypes=ALL)
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """y (dy - D), as torch has it on a CPU."""
    weights, given = widen(y), widen(dy)
    total = (weights * given).sum(-1, keepdim=True)
    return (weights * (given - total)).to(y.dtype)


@describe("softmax_backward", dtypes=ALL)
def two_products(y: Tensor, dy: Tensor) -> Tensor:
    """y dy - y D: the first product is shared with the sum, as in a fused kernel."""
    weights, given = widen(y), widen(dy)
    product = weights * given
    return (product - weights * product.sum(-1, keepdim=True)).to(y.dtype)


@describe("softmax_backward", contract="input")
def call_by_call(y: Tensor, dy: Tensor) -> Tensor:
    """Every call stores its result in the input dtype, as its contract declares."""
    return y * (dy - (y * dy).sum(-1, keepdim=True))
