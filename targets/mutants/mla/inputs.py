"""Smallest inputs of latent attention."""

import torch

from targets.mutants.mutant import Arguments, Builder


def latents(heads: int, keys: int) -> Builder:
    """All dimensions 1, queries and W_UK 1; latents and rotary keys 1, 2, ... over keys, W_UV over heads."""

    def build(dtype: torch.dtype) -> Arguments:
        ones = torch.ones(1, heads, 1, 1, dtype=dtype)
        keyed = torch.arange(1, keys + 1).view(1, keys, 1).to(dtype)
        headed = torch.arange(1, heads + 1).view(heads, 1, 1).to(dtype)
        return {
            "q_nope": ones, "q_pe": ones.clone(), "c_kv": keyed, "k_pe": keyed.clone(),
            "w_uk": torch.ones_like(headed), "w_uv": headed, "return_lse": True,
        }  # fmt: skip

    return build
