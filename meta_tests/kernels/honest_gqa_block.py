"""Grouped-query attention blocks that keep their contract, in real float32 (or float64) arithmetic.

The attention inside is that of `honest_attention`; the projections and the rotation are here. Shares no code with the
oracle but the rounding to a format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meta_tests.kernels.honest_attention import KERNELS, run
from meta_tests.kernels.honest_machine import Kernel, Machine
from oracle.formats import FORMATS, Format

Array = NDArray[Any]


@dataclass(frozen=True)
class BlockKernel:
    """core: the attention. stored: whether projections, rotated rows and outputs of heads are stored in the input
    format. calls: whether every operation of the rotation is stored too. The defects, each off by default: see below.
    """

    core: Kernel
    contract: dict[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ("fp32", "fp16", "bf16")
    stored: bool = True
    calls: bool = True


def project(m: Machine, x: Array, weight: Array) -> Array:
    if m.kernel.flush:
        x, weight = (np.where(np.abs(a) < m.fmt.smallest_normal, 0.0, a) for a in (x, weight))
    x, weight = (np.asarray(a, m.real) for a in (x, weight))
    if m.kernel.tf32:
        x, weight = (m.store(a, FORMATS["tf32"]) for a in (x, weight))
    return m.dot(x, np.ascontiguousarray(weight.T))


def rotate(m: Machine, x: Array, cos: Array, sin: Array, *, calls: bool) -> Array:
    """Halves paired, x cos + (-x_2, x_1) sin; ``calls``: each product and the sum rounded to the input format."""
    keep = (lambda a: m.store(m.keep(a))) if calls else m.keep
    half = x.shape[1] // 2
    first, second = x[:, :half], x[:, half:]
    left = keep(keep(first * cos) - keep(second * sin))
    right = keep(keep(second * cos) + keep(first * sin))
    return np.concatenate([left, right], axis=1)


def run_block(kernel: BlockKernel, fmt: Format, arrays: Mapping[str, Array], heads: int, kv_heads: int) -> Array:
    """y [S, E'] rounded to ``fmt`` for x [S, E]."""
    m = Machine(kernel.core, fmt)
    inner = fmt if kernel.stored else FORMATS[kernel.core.compute]

    def between(a: Array) -> Array:
        return m.store(a) if kernel.stored else a

    with np.errstate(all="ignore"):
        x = arrays["x"]
        cos, sin = (np.asarray(arrays[n], m.real) for n in ("cos", "sin"))
        q, k, v = (between(project(m, x, arrays[n])) for n in ("w_q", "w_k", "w_v"))
        dim = q.shape[1] // heads
        visible = np.tril(np.ones((len(x), len(x)), dtype=bool))
        outs = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            turned = [
                between(rotate(m, a[:, i * dim : (i + 1) * dim], cos, sin, calls=kernel.calls and kernel.stored))
                for a, i in ((q, h), (k, g))
            ]
            own = v[:, g * dim : (g + 1) * dim]
            part = run(kernel.core, inner, *turned, own, alpha=1 / np.sqrt(dim), visible=visible)
            outs.append(part.out)
        y = project(m, np.concatenate(outs, axis=1), arrays["w_o"])
        return m.store(y)


def _of(name: str, contract: dict[str, Any], **more: Any) -> BlockKernel:
    core = KERNELS[name]
    return BlockKernel(core, contract, core.formats, **more)


BLOCKS: dict[str, BlockKernel] = {
    "flash": _of("tile 16", {"preset": "flash"}),
    "flash, fma": _of("fma chains", {"preset": "flash"}, calls=False),
    "blas": _of("blas", {"preset": "flash"}),
    "lanes": _of("lanes", {"preset": "flash"}),
    "rounded sum": _of("rounded sum", {"preset": "flash", "row_sum": "rounded"}),
    "normalised": _of("normalised", {"preset": "flash", "normalised_p": True}),
    "split": _of("split 8", {"preset": "flash", "splits": 8}),
    "lazy": _of("lazy", {"preset": "flash", "lag": KERNELS["lazy"].lag}),
    "eager": _of("eager", {"preset": "eager"}),
    "sqrt scale": _of("sqrt scale", {"preset": "sdpa_math"}),
    "fp32": _of("uncast", {"preset": "fp32"}, stored=False),
    "fp64": replace(_of("fp64", {"preset": "fp64"}), formats=("fp64",)),
    "tf32": replace(_of("tf32", {"preset": "tf32"}), formats=("fp32",)),
    "flush": _of("flush", {"preset": "flash", "flush": True}),
}
