"""Blocks of multi-head latent attention that keep their contract; the core is that of `mla_kernels`.

Shares no code with the oracle but the rounding to a format and the reading of the parameters of scaled frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meta_tests.kernels.honest_rope_scaling import WAYS, Maker, frequencies, magnitude
from meta_tests.kernels.mla_kernels import Kernel, run
from oracle.formats import FORMATS
from oracle.ops.rope.parameters import read_scaling
from oracle.ops.rope.scaling import Magnitude, Scaling

Array = NDArray[Any]


@dataclass(frozen=True)
class BlockKernel:
    """core: the attention. between, table: storage formats (None: wide). calls: the rotation's operations are stored
    too. cache: format of the kept latents, scaled row by row. row_by_row: every row alone, from the kept latents. way,
    worst: how scaled frequencies are made (`honest_rope_scaling`). turn_first: the magnitude multiplies rotated rows.
    part: of scaling, what is left out (a defect).
    """

    core: Kernel
    contract: dict[str, Any] = field(default_factory=dict)
    between: str | None = None
    table: str | None = None
    calls: bool = False
    cache: str | None = None
    row_by_row: bool = False
    way: str = "host"
    worst: bool = False
    turn_first: bool = False
    part: str = ""

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


def maker_of(kernel: BlockKernel) -> Maker:
    fmt = FORMATS["fp64" if kernel.core.wide is np.float64 else "fp32"]
    return Maker(fmt, kernel.way, np.random.default_rng(5), kernel.worst)


def scaling_of(options: Mapping[str, Any], dim: int) -> Scaling | None:
    if options.get("scaling") is None:
        return None
    return read_scaling(options["scaling"], base=options.get("base", 10000.0), dim=dim, rotary_dim=dim)


def table(kernel: BlockKernel, positions: Array, dim: int, options: Mapping[str, Any]) -> tuple[Array, Array, float]:
    """cos and sin [S, d/2], and what still multiplies the rotated rows."""
    wide, base, scaling, size = kernel.core.wide, options.get("base", 10000.0), scaling_of(options, dim), 1.0
    if scaling is None or kernel.part == "scaling":
        theta = wide(1) / wide(base) ** (np.arange(0, dim, 2).astype(wide) / wide(dim))
    else:
        given = options["scaling"].get("seq_len", "call")
        length = given if isinstance(given, int) else int(positions.max()) + 1
        theta = frequencies(scaling, base, dim, length, maker_of(kernel)).astype(wide)
        size = 1.0 if kernel.part == "magnitude" else magnitude(scaling, maker_of(kernel))
    angle = positions.astype(wide)[:, None] * theta
    inside = wide(1.0 if kernel.turn_first else size)
    cos, sin = (kernel.core.store(f(angle).astype(wide) * inside, kernel.table) for f in (np.cos, np.sin))
    return cos, sin, size if kernel.turn_first else 1.0


def scale_of(kernel: BlockKernel, options: Mapping[str, Any], widths: tuple[int, int]) -> float | None:
    """The scale, with what scaling multiplies it by; None: the core's default."""
    scaling = scaling_of(options, widths[1])
    if options.get("scale") is not None or scaling is None or not scaling.all_dim or kernel.part == "softmax factor":
        return options.get("scale")
    maker = maker_of(kernel)
    root = magnitude(Scaling(factor=scaling.factor, magnitude=Magnitude("yarn", numerator=scaling.all_dim)), maker)
    whole = maker.h(maker.h(1 / np.sqrt(sum(widths))) * root)
    return float(whole if kernel.part == "square" else maker.h(whole * root))


def rotate(kernel: BlockKernel, x: Array, positions: Array, options: Mapping[str, Any]) -> Array:
    dim, layout = x.shape[1], options.get("layout", "half")
    cos, sin, size = table(kernel, positions, dim, options)
    places = (slice(0, dim // 2), slice(dim // 2, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    first, second = x[:, places[0]], x[:, places[1]]

    def step(a: Array) -> Array:
        return kernel.core.store(a, kernel.between) if kernel.calls else a

    out = np.zeros_like(x)
    out[:, places[0]] = step(step(first * cos) - step(second * sin))
    out[:, places[1]] = step(step(second * cos) + step(first * sin))
    return kernel.keep(out * kernel.core.wide(size))


def quantised(kernel: BlockKernel, c: Array) -> Array:
    if kernel.cache is None:
        return c
    wide, fmt = kernel.core.wide, FORMATS[kernel.cache]
    factor = np.maximum(np.abs(c).max(axis=1, keepdims=True) / wide(fmt.max_finite), wide(2.0**-100))
    return kernel.keep(fmt.round((c / factor).astype(np.float64)).astype(wide) * factor)


def run_block(kernel: BlockKernel, fmt: str, arrays: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """y [S, E'] rounded to ``fmt`` for x [S, E] and positions [S]."""
    core, wide = kernel.core, kernel.core.wide
    eps = options.get("eps", 1e-6)
    w = {n: a.astype(wide) for n, a in arrays.items() if n != "positions"}
    positions, x = arrays["positions"], w["x"]
    with np.errstate(all="ignore"):
        c_kv = quantised(kernel, norm(kernel, kernel.keep(core.dot(x, w["w_dkv"].T)), options.get("norm_kv"), eps))
        k_pe = rotate(kernel, kernel.keep(core.dot(x, w["w_kr"].T)), positions, options)
        c_q = norm(kernel, kernel.keep(core.dot(x, w["w_dq"].T)), options.get("norm_q"), eps)
        scale = scale_of(kernel, options, (w["w_uk"].shape[1], w["w_kr"].shape[0]))
        outs = []
        for h in range(len(w["w_uk"])):
            q_nope = kernel.keep(core.dot(c_q, w["w_uq"][h].T))
            q_pe = rotate(kernel, kernel.keep(core.dot(c_q, w["w_qr"][h].T)), positions, options)
            own = (w["w_uk"][h], w["w_uv"][h])
            stored = kernel.between or ("fp64" if wide is np.float64 else "fp32")
            rows = [slice(i, i + 1) for i in range(len(x))] if kernel.row_by_row else [slice(None)]
            parts = []
            for row in rows:
                kept = slice(0, row.stop)
                seen = np.arange(len(x))[None, kept] <= np.arange(len(x))[row, None]
                given = (q_nope[row], q_pe[row], c_kv[kept], k_pe[kept], *own)
                parts.append(run(core, given, seen, scale, stored)[0].astype(wide))
            outs.append(np.concatenate(parts))
        return np.asarray(FORMATS[fmt].round(core.dot(np.concatenate(outs, axis=1), w["w_o"].T).astype(np.float64)))


def blocks(fmt: str) -> dict[str, BlockKernel]:
    """Honest blocks for inputs of ``fmt``."""
    if fmt == "fp64":
        wide = Kernel("materialised", wide=np.float64)
        whole = BlockKernel(wide, {"preset": "fp64", "form": "materialised"})
        return {
            "materialised": whole,
            **{way: replace(whole, way=way, worst=True) for way in WAYS},
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
        made[f"{form} narrow"] = replace(made[f"{form} fp32"], way="narrow", worst=True)
    made["exponent"] = replace(made["materialised fp32"], way="exponent", worst=True, turn_first=True)
    made["wide"] = replace(made["absorbed flash"], way="wide")
    made["narrow flash"] = replace(made["materialised flash"], way="narrow", worst=True, calls=False)
    if fmt == "fp32":
        made["tf32"] = BlockKernel(Kernel("materialised", operands="tf32"), {"preset": "tf32", "form": "materialised"})
    return made
