"""Scaled rotary frequencies in NumPy float64: inverse frequencies, magnitude and axes of transformers' rope_parameters.

Written from the published rules, apart from `rope_frequencies_torch`: one routine per rule over the frequencies
theta [d/2]; NotImplementedError for what is no rule here.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from oracle.formats import StoredArray
from oracle.ops.rope.parameters import RopeParameters

Floats = NDArray[np.float64]


def frequencies(base: float, d: int, scaling: RopeParameters | None, length: int) -> Floats:
    """theta [d/2] for a sequence of `length`."""
    exponent = np.arange(0, d, 2) / d
    rule = "default" if scaling is None else scaling["rope_type"]
    if scaling is None or rule == "default":
        return np.asarray(base**-exponent)
    if rule == "linear":
        return np.asarray(base**-exponent / scaling["factor"])
    if rule == "dynamic":
        beyond = max(length / scaling["max_position_embeddings"] - 1, 0)
        return np.asarray((base * (1 + scaling["factor"] * beyond) ** (d / (d - 2))) ** -exponent)
    if rule == "longrope":
        long = length > scaling["original_max_position_embeddings"]
        return np.asarray(base**-exponent / np.asarray(scaling["long_factor" if long else "short_factor"]))
    if rule not in ("yarn", "llama3"):
        raise NotImplementedError(f"rope_type {rule!r}")
    theta = np.asarray(base**-exponent)
    slowed = 1 - _kept(theta, base, scaling)
    return np.asarray(theta * (1 - slowed * (1 - 1 / _factor(scaling))))


def _kept(theta: Floats, base: float, scaling: RopeParameters) -> Floats:
    """How much of each frequency stays as it is."""
    trained = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        few, many = scaling["low_freq_factor"], scaling["high_freq_factor"]
    else:
        few, many = scaling.get("beta_slow") or 1, scaling.get("beta_fast") or 32
    if scaling["rope_type"] == "llama3" or scaling.get("ramp") == "rotations":
        return np.asarray(np.clip((trained * theta / (2 * pi) - few) / (many - few), 0, 1))
    # The pair whose frequency makes so many rotations within the trained length.
    half = len(theta)
    first, last = (half * log(trained / (2 * pi * rotations), base) for rotations in (many, few))
    if scaling.get("truncate", True):
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if last > first else 0.001
    return np.asarray(1 - np.clip((np.arange(half) - first) / width, 0, 1))


def _factor(scaling: RopeParameters) -> float:
    given = scaling.get("factor")
    if given is None:
        given = scaling["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return float(given)


def magnitude(scaling: RopeParameters | None) -> float:
    """What cos and sin are multiplied by."""
    if scaling is None or scaling["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    growth = log(max(_factor(scaling), 1.0))
    if scaling["rope_type"] == "longrope":
        return sqrt(1 + growth / log(scaling["original_max_position_embeddings"]))
    one, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("mscale_rule") == "deepseek":
        one, every = (1.0 if one is None else one), (every or 0.0)
    elif not one or not every:
        one, every = 1.0, 0.0
    return float((1 + one * growth / 10) / (1 + every * growth / 10))


def length_of(positions: StoredArray, scaling: RopeParameters | None) -> int:
    """Length of the sequence: as stated, or by the largest position of the call."""
    given = "call" if scaling is None else scaling.get("seq_len", "call")
    if given == "sequence":
        raise NotImplementedError("seq_len 'sequence'")
    return int(np.max(positions)) + 1 if given == "call" else int(given)


def by_pair(positions: NDArray[np.int64], scaling: RopeParameters | None) -> NDArray[np.int64]:
    """Positions [..., S] as [..., S, 1]; with sections [3, ..., S] as [..., S, d/2], each pair's own."""
    if scaling is None or scaling.get("mrope_section") is None:
        return np.asarray(positions)[..., None]
    parts = scaling["mrope_section"]
    if scaling.get("mrope_interleaved"):
        axis = [i % 3 if i < 3 * parts[i % 3] else 0 for i in range(sum(parts))]
    else:
        axis = [place for place in range(3) for _ in range(parts[place])]
    return np.moveaxis(np.asarray(positions)[axis], 0, -1)
