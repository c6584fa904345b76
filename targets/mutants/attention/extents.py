"""Tails, tiles and extents: keys, rows and columns that are dropped, added or exchanged."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from targets.honest import flash
from targets.honest.flash import Steps, kernel
from targets.mutants.attention.inputs import ONE, ZERO, one_head
from targets.mutants.mutant import mutant


@mutant(
    "attention",
    "P18",
    "Without a mask, the zeros that fill the last tile of keys are attended to.",
    reports="Reported: 66RING/tiny-flash-attention#12.",
    smallest=one_head(ZERO, ZERO, ONE),
)
def tail_keys_kept(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    if attn_mask is None and not is_causal:
        tail = (0, 0, 0, -k.shape[-2] % flash.TILE)
        k, v = pad(k, tail), pad(v, tail)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def one_too_few(tile: Tensor, seen: flash.Masks) -> Tensor:
    kept = torch.arange(tile.shape[-1]) < flash.TILE - 1
    return torch.where(kept, flash.exclude(tile, seen), -math.inf)


last_key_of_full_tile_dropped = mutant(
    "attention",
    "P18",
    "The bounds check keeps keys below T - 1 in a full tile of T keys.",
    smallest=one_head(ZERO, [[0.0]] * 32, [[0.0]] * 31 + [[1.0]]),
)(kernel(Steps(exclude=one_too_few)))


def whole_tiles(rows: int, keys: int) -> Tensor:
    end = max(keys // flash.TILE * flash.TILE, min(keys, flash.TILE))
    return flash.causal(rows, keys) & (torch.arange(keys) < end)


last_tile_dropped = mutant(
    "attention",
    "P4",
    "The causal loop runs over floor instead of ceil of the number of tiles: a partial last tile is never read.",
    smallest=one_head([[0.0]] * 33, [[0.0]] * 33, [[0.0]] * 32 + [[1.0]], is_causal=True),
)(kernel(Steps(causal=whole_tiles)))


@mutant(
    "attention",
    "P18",
    "Queries are handled in pairs: with an odd number of them, from three on, the last stays zero.",
    smallest=one_head([[0.0]] * 3, ZERO, ONE),
)
def last_odd_row_zeroed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    problem = flash.prepare(q, k, v, flash.HONEST, scale, is_causal, attn_mask)
    out, log = flash.attend(problem, flash.HONEST, q.dtype)
    rows = q.shape[-2]
    written = torch.arange(rows) < max(rows // 2 * 2, 1)
    out = torch.where(written[:, None], out, 0.0).to(q.dtype)
    return (out, log) if return_lse else out


def swap(v: Tensor) -> Tensor:
    full = v.shape[-2] // flash.TILE
    if full < 3:
        return v
    first, second, end = ((full + i) * flash.TILE for i in (-2, -1, 0))
    return torch.cat((v[..., :first, :], v[..., second:end, :], v[..., first:second, :], v[..., end:, :]), -2)


@mutant(
    "attention",
    "P27",
    "From three full tiles of keys on, the values of the last two change places, as two swapped pages would.",
    smallest=one_head(ONE, [[0.0]] * 95 + [[20.0]], [[0.0]] * 95 + [[1.0]]),
)
def value_tiles_swapped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    return flash.attention(q, k, swap(v), scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)


def first_64(q: Tensor, k: Tensor, alpha: float) -> Tensor:
    return flash.scores(q[..., :64], k[..., :64], alpha)


head_dim_beyond_64_ignored = mutant(
    "attention",
    "P18",
    "Scores read the first 64 entries of a head only.",
    reports="Confirmed: triton-lang/triton#621.",
    smallest=one_head([[1.0] * 65], [[0.0] * 64 + [1.0]], ONE),
)(kernel(Steps(scores=first_64)))


@mutant(
    "attention",
    "P18",
    "The extent of V is taken from the head dimension: with Dv > D the columns beyond D stay zero.",
    reports="Reported: XunhaoLai/native-sparse-attention-triton#27.",
    smallest=one_head(ZERO, ZERO, [[1.0, 1.0]]),
)
def value_dim_from_head_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
) -> flash.Result:
    written = torch.arange(v.shape[-1]) < q.shape[-1]
    v = torch.where(written, v, 0.0).to(v.dtype)
    return flash.attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=attn_mask, return_lse=return_lse)
