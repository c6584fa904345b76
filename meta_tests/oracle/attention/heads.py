"""Heads of attention for the tests of enclosures."""

from __future__ import annotations

from typing import Any

import numpy as np

from meta_tests.witnesses.attention import case_of
from oracle.case import Case


def scaled(case: Case, **factors: Any) -> Case:
    return case.with_arrays(**{name: case.arrays[name] * factor for name, factor in factors.items()})


def edge_cases() -> dict[str, Case]:
    """Named inputs at the edges of what float64 and a score can be."""
    rng = np.random.default_rng(11)
    base = case_of(rng, (1, 2, 1, 3, 5, 4, 3))
    q, k, v = (base.arrays[n] for n in ("q", "k", "v"))
    far = np.concatenate([np.full((1, 2, 3, 1), 1e6), q], axis=-1)
    cases = {
        "plain": base,
        "grouped heads": case_of(rng, (2, 6, 2, 2, 3, 5, 2)),
        "single key": case_of(rng, (1, 1, 1, 3, 1, 4, 3)),
        "D = 1": case_of(rng, (1, 1, 1, 4, 6, 1, 1)),
        "D = 256": case_of(rng, (1, 1, 1, 2, 5, 256, 2)),
        "bf16": case_of(rng, (1, 1, 1, 3, 9, 16, 4), dtype="bf16"),
        "1e-300": scaled(base, q=1e-300, k=1e-300, v=1e-300),
        "1e300 times 1e-300": scaled(base, q=1e300, k=1e-300, v=1e300),
        "subnormal": scaled(base, q=5e-321, k=3e-320, v=1e-322),
        "subnormal keys, huge queries": scaled(base, q=1e300, k=1e-310),
        "peaked": scaled(base, q=1e4),
        "common offset": base.with_arrays(q=far, k=np.concatenate([np.full((1, 1, 5, 1), 1e3), k], axis=-1), v=v),
        "equal rows": base.with_arrays(k=np.repeat(k[:, :, :1], 5, axis=2), v=np.repeat(v[:, :, :1], 5, axis=2)),
        "zeros": scaled(base, q=0.0, v=0.0),
        "mixed scales": base.with_arrays(k=np.ldexp(k, rng.integers(-400, 8, k.shape))),
        "scale 0": base.with_options(scale=0.0),
        "scale negative": base.with_options(scale=-0.7),
        "causal top left": base.with_options(is_causal=True),
        "causal bottom right": base.with_options(is_causal=True, causal_alignment="bottom_right"),
        "causal with empty rows": case_of(rng, (1, 1, 1, 6, 3, 4, 2), is_causal=True, causal_alignment="bottom_right"),
        "boolean mask": base.with_options(attn_mask=rng.random((1, 2, 3, 5)) < 0.5),
        "all masked": base.with_options(attn_mask=np.zeros((1, 1, 3, 5), dtype=bool)),
        "bias": base.with_options(attn_mask=3 * rng.standard_normal((1, 1, 3, 5))),
        "bias -inf": base.with_options(
            attn_mask=np.where(rng.random((1, 1, 3, 5)) < 0.5, -np.inf, rng.standard_normal((1, 1, 3, 5)))
        ),
        "bias -1e30": base.with_options(attn_mask=np.where(rng.random((1, 1, 3, 5)) < 0.5, -1e30, 0.5)),
        "bias -3e38 in float32": base.with_options(
            attn_mask=np.where(rng.random((1, 1, 3, 5)) < 0.5, -3e38, 0.5).astype(np.float32)
        ),
        "whole rows at -1e30": base.with_options(attn_mask=np.full((1, 1, 3, 5), -1e30)),
    }
    hidden = np.ones((1, 1, 3, 5), dtype=bool)
    hidden[..., 2] = False
    spoiled_k, spoiled_v = k.copy(), v.copy()
    spoiled_k[:, :, 2, 0], spoiled_v[:, :, 2, 1] = np.nan, np.inf
    cases["nan behind a mask"] = base.with_arrays(k=spoiled_k, v=spoiled_v).with_options(attn_mask=hidden)
    huge_k, huge_v = k.copy(), v.copy()
    huge_k[:, :, 2], huge_v[:, :, 2] = 1e250, -1e300
    cases["1e250 behind a mask"] = base.with_arrays(k=huge_k, v=huge_v).with_options(attn_mask=hidden)
    return cases


EDGES = edge_cases()
