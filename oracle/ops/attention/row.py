"""Attention as a row of the table of ops, and what other ops that attend share with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oracle.block import Block
from oracle.case import Case
from oracle.contract import presets
from oracle.enclosure import Enclosure
from oracle.formats import INPUTS, Float64Array
from oracle.ops.attention.case import (
    OPTIONS,
    blocks,
    evaluate,
    model,
    modelled,
    output_shapes,
    together,
)
from oracle.ops.attention.limits import LIMITS
from oracle.ops.attention.options import CHOICES, DESCALES
from oracle.ops.op import REFUSAL, Array, Op
from oracle.vacuity import mean_of_visible

SCORES: Mapping[str, tuple[str, ...]] = {
    "causal_alignment": CHOICES["causal_alignment"],
    "lse_base": ("e", "2"),
    "empty_row": ("zero", "nan", "mean"),
    "empty_row_lse": ("-inf", "+inf", "finite"),
    "masked_nan": ("blocked", "leaks"),
}
"""Conventions of every op that has scores."""
NAN_BEHIND: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "masked_nan": lambda options: _mask_of(options, boolean=True),
    "masked_nan_additive": lambda options: _mask_of(options, boolean=False),
    "masked_nan_causal": lambda options: bool(options.get("is_causal")),
    "masked_nan_window": lambda options: options.get("window_size") is not None,
}
"""Whether a NaN in a key that a row may not attend to reaches the row, by what excludes the key -> whether a case's
options have such an exclusion. A score that is replaced blocks it, one that -inf is added to does not."""
CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    **SCORES,
    **dict.fromkeys(NAN_BEHIND, SCORES["masked_nan"]),
    **CHOICES,
    "batch_invariant": ("yes", "no"),
}
ARRAYS = {"q": Array("B Hq Sq D"), "k": Array("B Hkv Sk D"), "v": Array("B Hkv Sk Dv")}
RESULTS = {"out": "B Hq Sq Dv", "lse": "B Hq Sq"}


def _mask_of(options: Mapping[str, Any], *, boolean: bool) -> bool:
    mask = options.get("attn_mask")
    return mask is not None and (mask.dtype == np.bool_) == boolean


def scale_of(*queries: str) -> Callable[[Case], float]:
    """1 over the root of the width of these arrays together."""
    return lambda case: 1.0 / float(np.sqrt(sum(case.arrays[name].shape[-1] for name in queries)))


def _ones(case: Case) -> Float64Array:
    """Factors [B, Hkv] that change nothing."""
    ones: Any = np.ones(tuple(case.arrays["k"].shape[:2]), dtype=np.float32)
    return ones  # type: ignore[no-any-return]


def mean_of_values(case: Case, block: Block) -> Mapping[str, Enclosure]:
    """The mean of V over the keys that each row may see."""
    (batch, head), v = block.key, case.arrays["v"]
    group = case.arrays["q"].shape[1] // v.shape[1]
    return {"the mean of V": mean_of_visible(block.visible_keys(), v[batch, head // group])}


OPS = (
    Op(
        name="attention",
        family="attention",
        presets=presets.ATTENTION,
        arrays=ARRAYS,
        results=RESULTS,
        options=OPTIONS,
        conventions={**CONVENTIONS, **dict.fromkeys(LIMITS, REFUSAL)},
        limits=LIMITS,
        extras={"dropout_p": 0.0, "seed": 0, "training": False, "num_splits": 1},
        usual={"scale": scale_of("q"), **dict.fromkeys(DESCALES, _ones)},
        formats=INPUTS,
        trivial=mean_of_values,
        blocks=blocks,
        row_count=lambda case, key=(): int(case.arrays["q"].shape[2]),
        evaluate=evaluate,
        together=together,
        output_shapes=output_shapes,
        model=model,
        modelled=modelled,
        width=lambda case, key: int(case.arrays["k"].shape[2]),
    ),
)
