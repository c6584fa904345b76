"""Cases of mla_block, and honest blocks beside their enclosures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meta_tests.kernels.honest_mla_block import BlockKernel, run_block
from meta_tests.kernels.honest_rope_scaling import draw_parameters
from oracle.block import Block
from oracle.bounds.blocks import mla as bounded
from oracle.case import Case
from oracle.contract.contract import Contract
from oracle.evaluate import enclose, refine
from oracle.formats import Format
from oracle.ops.contracts import declared_forms
from oracle.ops.rope.parameters import read_scaling

Array = NDArray[Any]
KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")


def case_of(family: str, fmt: Format, rng: np.random.Generator) -> Case:
    pick = rng.choice
    length, heads = int(pick([2, 5, 17, 33])), int(pick([1, 2, 3]))
    width, d_c, d_cq = int(pick([4, 12])), int(pick([3, 16])), int(pick([2, 8]))
    d_h, d_v, d_r = int(pick([1, 8])), int(pick([2, 8])), int(pick([2, 8]))
    d_r = int(pick([4, 12])) if family in ("scaled", "deepseek", "scaled beyond") else d_r
    length = 1 if family == "one row" else length
    shapes = {
        "w_dkv": (d_c, width),
        "w_uk": (heads, d_h, d_c),
        "w_uv": (heads, d_v, d_c),
        "w_kr": (d_r, width),
        "w_dq": (d_cq, width),
        "w_uq": (heads, d_h, d_cq),
        "w_qr": (heads, d_r, d_cq),
        "w_o": (5, heads * d_v),
    }
    w = {n: rng.standard_normal(s) / np.sqrt(s[-1]) for n, s in shapes.items()}
    x, positions = rng.standard_normal((1, length, width)), np.arange(length, dtype=np.int64)
    options: dict[str, Any] = {"layout": str(pick(["half", "interleaved"]))}
    match family:
        case "norms" | "eps":
            options |= {
                "norm_kv": fmt.store(1 + 0.2 * rng.standard_normal(d_c)),
                "norm_q": fmt.store(1 + 0.2 * rng.standard_normal(d_cq)),
            }
            if family == "eps":
                options["eps"], x = 1e-3, x * 0.03
        case "tiny x":
            x = x * 1e-3
        case "large x":
            x, options["scale"] = x * 30, 1e-3
        case "far positions":
            positions, options["base"] = positions + int(pick([100, 4000])), float(pick([1e4, 500.0]))
        case "scaled":
            options["base"] = float(pick([1e4, 5e5, 777.7]))
            options["scaling"] = parameters_of(rng, str(pick(KINDS)), d_r, options["base"])
            positions = positions + int(pick([0, 63, 4090]))
        case "scaled beyond":
            # Small x keeps the softmax open, so that angles that differ a little move the output.
            options["base"], x = 1e4, x * 0.5
            options["scaling"] = parameters_of(rng, str(pick(KINDS)), d_r, 1e4)
            positions = np.sort(rng.integers(0, int(pick([10_000, 200_000])), length))
        case "deepseek":
            options["scaling"] = {
                "rope_type": "yarn", "factor": float(pick([40.0, 4.0])), "original_max_position_embeddings": 64,
                "beta_fast": 8, "mscale_all_dim": float(pick([1.0, 0.707])), "mscale": float(pick([1.0, 0.1])),
            }  # fmt: skip
            positions = positions + int(pick([0, 60, 500]))
        case "peaked":
            w["w_uq"], w["w_qr"] = w["w_uq"] * 8, w["w_qr"] * 8
        case "outliers":
            x = x * np.where(rng.random(x.shape) < 0.1, 30, 1)
        case "cancelling":
            x[..., 1::2] = x[..., 0::2]
            w["w_dkv"][:, 1::2] = -w["w_dkv"][:, 0::2] * (1 + 2.0**-8)
    arrays = {"x": fmt.store(x), "positions": positions, **{n: fmt.store(a) for n, a in w.items()}}
    return Case("mla_block", arrays, options)


def parameters_of(rng: np.random.Generator, kind: str, dim: int, base: float) -> dict[str, Any]:
    """Drawn parameters that make sense for so few pairs."""
    while True:
        parameters = draw_parameters(rng, kind, dim)
        try:
            read_scaling(parameters, base=base, dim=dim, rotary_dim=dim)
        except ValueError as reason:
            assert "leaves no ramp" in str(reason)
            continue
        return parameters


def wide(case: Case) -> dict[str, Array]:
    return {
        n: a if n == "positions" else a.astype(np.float64) for n, a in {**case.arrays, "x": case.arrays["x"][0]}.items()
    }


def options_of(case: Case) -> dict[str, Any]:
    return {n: v.astype(np.float64) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}


def form_of(kernel: BlockKernel, fmt: Format, contract: dict[str, Any] | None = None) -> Contract:
    core = kernel.core
    return next(
        f
        for f in declared_forms("mla_block", dict(contract or kernel.contract), fmt.name)
        if (f.latent.form, f.weights.normalised, f.sums.splits > 1, f.sums.row_sum == "rounded", f.sums.lag)
        == (core.form, core.normalised, core.splits > 1, core.rounded_sum, core.lag)
    )


def enclosed(case: Case, form: Contract, fmt: Format, block: Block | None = None) -> tuple[Block, Any]:
    """The block, from the one of ``enclose`` where that is at hand, refined until its radii do not count."""
    block = enclose(case)[0] if block is None else block
    for precision in (128, 512):
        promise = bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]
        coarse = ~(block.part("out").rad <= promise.bound / 1000).all(axis=1)
        if not coarse.any():
            return block, promise
        block = refine(case, block, coarse, precision)
    return block, bounded.bounds(case, block, (form,), {"out": fmt})[0]["out"]


def ratio(
    kernel: BlockKernel,
    case: Case,
    fmt: Format,
    contract: dict[str, Any] | None = None,
    *,
    start: int = 0,
    block: Block | None = None,
) -> float:
    """The worst of all rows from ``start`` on."""
    block, promise = enclosed(case, form_of(kernel, fmt, contract), fmt, block)
    y = run_block(kernel, fmt.name, wide(case), options_of(case))
    part = block.part("out")
    with np.errstate(all="ignore"):
        certain = np.maximum(part.distance(y) - part.rad, 0.0)
        found = np.where(certain > 0, certain / promise.bound, 0.0)
    found = np.where(np.isfinite(y), found, np.inf)
    return float(np.where(promise.may_overflow & ~np.isfinite(y), 0.0, found)[start:].max())
