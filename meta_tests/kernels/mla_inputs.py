"""Inputs that make MLA kernels err: families of cases, one batch and one head each, and their enclosures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.ball import BallArithmetic
from oracle.block import Block
from oracle.case import Case
from oracle.formats import FORMATS
from oracle.ops.mla import case as mla_case

OP = mla_case.OPS[0]
FAMILIES = (
    "normal", "outlier", "massive", "tiny", "offset", "huge offset", "cancelling", "parts cancel", "peaked",
    "ties", "one sign", "growing", "zeros", "near fp16 maximum", "scaled", "tiny latents", "swamped products",
    "swamped latents",
)  # fmt: skip


def draw(rng: np.random.Generator, fmt: str, family: str, shape: tuple[int, ...] | None = None) -> Case:
    """One batch, one head; ``shape`` is (Sq, Sk, d_h, d_r, d_c, d_v), drawn small if None."""
    pick = rng.choice
    drawn = (
        rng.integers(1, 5),
        pick([1, 2, 5, 17, 33]),
        pick([1, 2, 4, 16]),
        pick([1, 2, 8]),
        pick([1, 3, 32]),
        pick([1, 2, 8]),
    )
    sq, sk, d_h, d_r, d_c, d_v = (int(n) for n in (drawn if shape is None else shape))

    def normal(*dims: int) -> NDArray[np.float64]:
        return rng.standard_normal(dims)

    q_nope, q_pe, c_kv, k_pe = (
        normal(1, 1, sq, d_h),
        normal(1, 1, sq, d_r),
        normal(1, sk, d_c),
        normal(1, sk, d_r),
    )
    w_uk, w_uv = normal(1, d_h, d_c) / np.sqrt(d_c), normal(1, d_v, d_c) / np.sqrt(d_c)
    options: dict[str, Any] = {}
    match family:
        case "outlier":
            for a in (q_nope, c_kv, k_pe):
                a[rng.random(a.shape) < 0.05] *= 30
        case "massive":
            c_kv[..., 0] *= 100
        case "tiny":
            c_kv, w_uv = c_kv * 1e-4, w_uv * 1e-3
        case "tiny latents":
            c_kv, w_uv = c_kv * 1e-6, w_uv * 1e3
        case "swamped products":
            # Each product but the first is nearly half a unit of the running float32 sum, and lost: an error
            # of d_c u, all one way.
            c_kv[:], w_uk[:], w_uv[:] = 1, 0.9 * 2.0**-24, 0.9 * 2.0**-24
            w_uk[..., 0], w_uv[..., 0] = 1, 1
        case "swamped latents":
            # The same in the sum over keys, in one component of the latent; another takes the keys in
            # reverse, and they cancel in v.
            q_nope, q_pe, w_uv = q_nope * 0, q_pe * 0, w_uv * 0
            c_kv[:] = 0.9 * 2.0**-24
            c_kv[0, 0, 0], c_kv[0, -1, -1], w_uv[..., 0], w_uv[..., -1] = 1, 1, 1, -1
        case "offset":
            k_pe[..., 0], q_pe[..., 0] = 50, 40
        case "huge offset":
            k_pe[..., 0], q_pe[..., 0] = 1000, 2000
        case "cancelling":
            # Columns of W of opposite sign meet nearly equal components: |W||c| is far above |W c|.
            half = (d_c + 1) // 2
            w_uk, w_uv = (np.concatenate([w[..., :half], -w[..., : d_c - half]], axis=-1) * 30 for w in (w_uk, w_uv))
            c_kv = np.concatenate([c_kv[..., :half], c_kv[..., : d_c - half]], axis=-1) * (
                1 + 2.0**-7 * normal(*c_kv.shape)
            )
        case "parts cancel":
            q_nope = q_nope * 30
            q_pe = np.resize(q_nope, q_pe.shape)
            k_pe = -np.resize(np.einsum("bsc,hdc->bsd", c_kv, w_uk), k_pe.shape)
        case "peaked":
            q_nope = q_nope * 30
        case "ties":
            c_kv[:], k_pe[:] = c_kv[:, :1], k_pe[:, :1]
        case "one sign":
            c_kv, w_uv = np.abs(c_kv), np.abs(w_uv)
        case "growing":
            k_pe[0, :, 0], q_pe[..., 0] = np.linspace(-8, 8, sk), 8
        case "zeros":
            c_kv, q_pe = c_kv * 0, q_pe * 0
        case "near fp16 maximum":
            c_kv, w_uv = c_kv * 100, w_uv * 50
        case "scaled":
            options["scale"] = float(rng.choice([1.7, 0.0, 3e-4, 20.0]))
        case _:
            assert family == "normal"
    if rng.random() < 0.4:
        options |= {"is_causal": True, "causal_alignment": str(rng.choice(["top_left", "bottom_right"]))}
    values = dict(zip(mla_case.INPUTS, (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv), strict=True))
    return Case("mla", {name: FORMATS[fmt].store(a) for name, a in values.items()}, options)


def enclosed(case: Case, ar: Any = None, *, key: tuple[int, int] = (0, 0), rows: Any = None) -> Block:
    arithmetic = BallArithmetic() if ar is None else ar
    index = np.arange(OP.row_count(case)) if rows is None else np.asarray(rows)
    with arithmetic.working():
        return OP.evaluate(arithmetic, case, key, index)
