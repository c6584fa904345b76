"""Blocks of multi-head latent attention that keep their contract; the core is that of `mla_kernels`.

Shares no code with the oracle but the rounding to a format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meta_tests.oracle.mla_kernels import Kernel, run
from oracle.formats import FORMATS

Array = NDArray[Any]


@dataclass(frozen=True)
class BlockKernel:
    """core: the attention. between, table: storage formats (None: wide). calls: the rotation's operations are stored
    too. cache: format of the kept latents, scaled row by row. row_by_row: every row alone, from the kept latents.
    """

    core: Kernel
    contract: dict[str, Any] = field(default_factory=dict)
    between: str | None = None
    table: str | None = None
    calls: bool = False
    cache: str | None = None
    row_by_row: bool = False

    def keep(self, x: Array) -> Array:
        return self.core.store(x, self.between)


def norm(kernel: BlockKernel, c: Array, gain: Array | None, eps: float) -> Array:
    if gain is None:
        return c
    wide = kernel.core.wide
    total = np.zeros((len(c), 1), wide)
    for i in range(c.shape[1]):
        total = total + c[:, i : i + 1] * c[:, i : i + 1]
    root = np.sqrt(total / wide(c.shape[1]) + wide(eps))
    return kernel.keep(kernel.keep(c * (wide(1) / root)) * gain.astype(wide))


def rotate(kernel: BlockKernel, x: Array, positions: Array, base: float, layout: str) -> Array:
    wide, dim = kernel.core.wide, x.shape[1]
    theta = wide(1) / wide(base) ** (np.arange(0, dim, 2).astype(wide) / wide(dim))
    angle = positions.astype(wide)[:, None] * theta
    cos, sin = (kernel.core.store(f(angle).astype(wide), kernel.table) for f in (np.cos, np.sin))
    places = (slice(0, dim // 2), slice(dim // 2, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    first, second = x[:, places[0]], x[:, places[1]]

    def step(a: Array) -> Array:
        return kernel.core.store(a, kernel.between) if kernel.calls else a

    out = np.zeros_like(x)
    out[:, places[0]] = step(step(first * cos) - step(second * sin))
    out[:, places[1]] = step(step(second * cos) + step(first * sin))
    return kernel.keep(out)


def quantised(kernel: BlockKernel, c: Array) -> Array:
    if kernel.cache is None:
        return c
    wide, fmt = kernel.core.wide, FORMATS[kernel.cache]
    factor = np.maximum(np.abs(c).max(axis=1, keepdims=True) / wide(fmt.max_finite), wide(2.0**-100))
    return kernel.keep(fmt.round((c / factor).astype(np.float64)).astype(wide) * factor)


def run_block(kernel: BlockKernel, fmt: str, arrays: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """y [S, E'] rounded to ``fmt`` for x [S, E] and positions [S]."""
    core, wide = kernel.core, kernel.core.wide
    base, layout, eps = options.get("base", 10000.0), options.get("layout", "half"), options.get("eps", 1e-6)
    w = {n: a.astype(wide) for n, a in arrays.items() if n != "positions"}
    positions, x = arrays["positions"], w["x"]
    with np.errstate(all="ignore"):
        c_kv = quantised(kernel, norm(kernel, kernel.keep(core.dot(x, w["w_dkv"].T)), options.get("norm_kv"), eps))
        k_pe = rotate(kernel, kernel.keep(core.dot(x, w["w_kr"].T)), positions, base, layout)
        c_q = norm(kernel, kernel.keep(core.dot(x, w["w_dq"].T)), options.get("norm_q"), eps)
        outs = []
        for h in range(len(w["w_uk"])):
            q_nope = kernel.keep(core.dot(c_q, w["w_uq"][h].T))
            q_pe = rotate(kernel, kernel.keep(core.dot(c_q, w["w_qr"][h].T)), positions, base, layout)
            own = (w["w_uk"][h], w["w_uv"][h])
            stored = kernel.between or ("fp64" if wide is np.float64 else "fp32")
            rows = [slice(i, i + 1) for i in range(len(x))] if kernel.row_by_row else [slice(None)]
            parts = []
            for row in rows:
                kept = slice(0, row.stop)
                seen = np.arange(len(x))[None, kept] <= np.arange(len(x))[row, None]
                given = (q_nope[row], q_pe[row], c_kv[kept], k_pe[kept], *own)
                parts.append(run(core, given, seen, options.get("scale"), stored)[0].astype(wide))
            outs.append(np.concatenate(parts))
        return np.asarray(FORMATS[fmt].round(core.dot(np.concatenate(outs, axis=1), w["w_o"].T).astype(np.float64)))


def blocks(fmt: str) -> dict[str, BlockKernel]:
    """Honest blocks for inputs of ``fmt``."""
    if fmt == "fp64":
        wide = Kernel("materialised", wide=np.float64)
        return {
            "materialised": BlockKernel(wide, {"preset": "fp64", "form": "materialised"}),
            "absorbed": BlockKernel(replace(wide, form="absorbed"), {"preset": "fp64", "form": "absorbed"}),
        }
    narrow = None if fmt == "fp32" else fmt
    made: dict[str, BlockKernel] = {}
    for form in ("materialised", "absorbed"):
        core = Kernel(form, weights=narrow)
        flash = BlockKernel(
            core, {"preset": "flash", "form": form}, between=narrow, table=narrow, calls=narrow is not None
        )
        made[f"{form} flash"] = flash
        made[f"{form} row by row"] = replace(flash, row_by_row=True, calls=False)
        made[f"{form} lanes, base two"] = replace(flash, core=replace(core, order="lanes", base_two=True))
        made[f"{form} fused"] = replace(flash, core=replace(core, order="fused"))
        made[f"{form} normalised"] = replace(
            flash, core=replace(core, normalised=True), contract={**flash.contract, "normalised_p": True}
        )
        made[f"{form} split"] = replace(flash, core=replace(core, splits=4), contract={**flash.contract, "splits": 4})
        made[f"{form} rounded sum"] = replace(
            flash, core=replace(core, rounded_sum=True), contract={**flash.contract, "row_sum": "rounded"}
        )
        made[f"{form} fp8 cache"] = replace(flash, cache="e4m3", contract={**flash.contract, "cache": "e4m3"})
        made[f"{form} eager"] = replace(
            flash,
            core=replace(core, normalised=True, stores=narrow, up=narrow, latent=narrow),
            contract={"preset": "eager", "form": form},
        )
        made[f"{form} fp32"] = BlockKernel(Kernel(form), {"preset": "fp32", "form": form})
    if fmt == "fp32":
        made["tf32"] = BlockKernel(Kernel("materialised", operands="tf32"), {"preset": "tf32", "form": "materialised"})
    return made
