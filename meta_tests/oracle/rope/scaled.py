"""Parameters of scaled frequencies, and cases with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.case import Case

KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 32.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.5, 10.0, 40.0],
}  # fmt: skip


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 2, 1]}


# Every rule and every key, over 8 rotated entries.
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.3},
    DYNAMIC,
    {**DYNAMIC, "factor": 1.0},
    {**DYNAMIC, "seq_len": 500},
    YARN,
    {**YARN, "ramp": "rotations"},
    {**YARN, "truncate": False},
    {**YARN, "beta_fast": 9.0, "beta_slow": 0.7, "truncate": False},
    {**YARN, "attention_factor": 0.9},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.25},
    {**YARN, "mscale": 0.707},
    {**YARN, "mscale": 0.707, "mscale_rule": "deepseek"},
    {**YARN, "mscale_all_dim": 0.5, "mscale_rule": "deepseek"},
    {"rope_type": "yarn", "original_max_position_embeddings": 2048, "max_position_embeddings": 6000},
    {**YARN, "factor": 1.0},
    LLAMA3,
    {**LLAMA3, "high_freq_factor": 32.0, "low_freq_factor": 0.3},
    LONG,
    {**LONG, "attention_factor": 1.3},
    {**LONG, "factor": 0.5},
    {**LONG, "seq_len": 65},
    SECTIONS,
    {**SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    {**YARN, "mrope_section": [0, 4, 0]},
)


def rope_of(x: Any, positions: Any, *, op: str = "rope", **options: Any) -> Case:
    return Case(op, {"dy" if op == "rope_backward" else "x": x, "positions": positions}, options)


def three(positions: Any, parameters: dict[str, Any]) -> Any:
    """The positions, on three axes where there are sections."""
    if "mrope_section" not in parameters:
        return positions
    return np.stack([positions, positions // 2 + 1, 3 * positions])
