"""Scaled rotary frequencies in torch, as models make them: parameters in Python floats, tensors in the table's dtype.

`scaling` holds transformers' `rope_parameters`. Written from the published rules: position interpolation (Chen et
al., arXiv 2306.15595), dynamic NTK, YaRN (Peng et al., arXiv 2309.00071), Llama 3.1, LongRoPE (Ding et al., arXiv
2402.13753), M-RoPE (Wang et al., arXiv 2409.12191). What is no rule here raises NotImplementedError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.ops.rope.parameters import RopeParameters


def plain(base: float, dim: int, dtype: torch.dtype) -> Tensor:
    """`[dim/2]`: base^(-2i/dim)."""
    powers: Tensor = base ** (torch.arange(0, dim, 2).to(dtype) / dim)
    return powers.reciprocal()


def kind_of(scaling: RopeParameters | None) -> str:
    return "default" if scaling is None else str(scaling["rope_type"])


def frequencies(base: float, dim: int, scaling: RopeParameters | None, length: int, dtype: torch.dtype) -> Tensor:
    """`[dim/2]`, scaled; `length` is that of the sequence."""
    if scaling is None:
        return plain(base, dim, dtype)
    match kind_of(scaling):
        case "default":
            return plain(base, dim, dtype)
        case "linear":
            return plain(base, dim, dtype) / float(scaling["factor"])
        case "dynamic":
            return plain(dynamic_base(base, dim, scaling, length), dim, dtype)
        case "yarn":
            frequency = plain(base, dim, dtype)
            return blend(frequency, yarn_share(frequency, base, dim, scaling), factor_of(scaling))
        case "llama3":
            frequency = plain(base, dim, dtype)
            limits = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = share_by_rotations(frequency, scaling["original_max_position_embeddings"], *limits)
            return blend(frequency, share, scaling["factor"])
        case "longrope":
            factors = scaling["long_factor" if length > scaling["original_max_position_embeddings"] else "short_factor"]
            return plain(base, dim, dtype) / torch.tensor(factors, dtype=dtype)
    raise NotImplementedError(f"rope_type {scaling['rope_type']!r}")


def blend(frequency: Tensor, share: Tensor, factor: float) -> Tensor:
    """`share` of the frequency as it is, the rest of it divided by the factor."""
    return (1 - share) * (frequency / factor) + share * frequency


def dynamic_base(base: float, dim: int, scaling: RopeParameters, length: int) -> float:
    trained, factor = scaling["max_position_embeddings"], scaling["factor"]
    ratio = factor * max(length, trained) / trained - (factor - 1)
    return float(base * ratio ** (dim / (dim - 2)))


def share_by_rotations(frequency: Tensor, trained: int, low: float, high: float) -> Tensor:
    """1 above `high` rotations within the trained length, 0 below `low`, a straight line between them."""
    rotations = frequency * (trained / (2 * math.pi))
    return ((rotations - low) / (high - low)).clamp(0, 1)


def yarn_share(frequency: Tensor, base: float, dim: int, scaling: RopeParameters) -> Tensor:
    trained = scaling["original_max_position_embeddings"]
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    if scaling.get("ramp", "dimension") == "rotations":
        return share_by_rotations(frequency, trained, slow, fast)
    low, high = (dim * math.log(trained / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in (fast, slow))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2).to(frequency.dtype)
    return 1 - ((pairs - low) / (high - low)).clamp(0, 1)


def factor_of(scaling: RopeParameters) -> float:
    """The stated factor, or that of the two lengths."""
    given = scaling.get("factor")
    if given is not None:
        return float(given)
    return float(scaling["max_position_embeddings"] / scaling["original_max_position_embeddings"])


def magnitude(scaling: RopeParameters | None) -> float:
    """What multiplies cos and sin."""
    if scaling is None or kind_of(scaling) not in ("yarn", "longrope"):
        return 1.0
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if kind_of(scaling) == "longrope":
        factor = factor_of(scaling)
        trained = scaling["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("mscale_rule", "transformers") == "deepseek":
        one, all_dim = 1 if one is None else one, all_dim or 0
    elif not (one and all_dim):
        one, all_dim = 1, 0
    return tempered(factor_of(scaling), float(one)) / tempered(factor_of(scaling), float(all_dim))


def softmax_factor(scaling: RopeParameters | None) -> float:
    """What DeepSeek's attention multiplies its softmax scale by."""
    if scaling is None or not scaling.get("mscale_all_dim"):
        return 1.0
    return tempered(factor_of(scaling), float(scaling["mscale_all_dim"])) ** 2


def tempered(factor: float, m: float) -> float:
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def length_of(positions: Tensor, scaling: RopeParameters | None) -> int:
    """The length of the sequence: stated, or one more than the largest position of the call."""
    if kind_of(scaling) not in ("dynamic", "longrope") or scaling is None:
        return 0
    given = scaling.get("seq_len", "call")
    if given == "sequence":
        raise NotImplementedError("seq_len 'sequence': one set of frequencies for each sequence")
    return int(positions.max()) + 1 if given == "call" else int(given)


def sections(scaling: RopeParameters | None) -> tuple[int, int, int] | None:
    given = None if scaling is None else scaling.get("mrope_section")
    return None if given is None else (given[0], given[1], given[2])


def axes(parts: tuple[int, int, int], interleaved: bool) -> Tensor:
    """`[dim/2]`: 0, 1 or 2, the position by which each pair turns."""
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(parts))
    axis = torch.zeros(sum(parts), dtype=torch.int64)
    for place in (1, 2):
        axis[place : 3 * parts[place] : 3] = place
    return axis


def angles(positions: Tensor, frequency: Tensor, scaling: RopeParameters | None) -> Tensor:
    """`[..., S, dim/2]` of positions `[..., S]`, or `[3, ..., S]` where there are sections."""
    parts = sections(scaling)
    angle = positions[..., None].to(frequency.dtype) * frequency
    if parts is None or scaling is None:
        return angle
    axis = axes(parts, bool(scaling.get("mrope_interleaved"))).to(angle.device)
    return angle.gather(0, axis.expand(1, *angle.shape[1:])).squeeze(0)
