"""Strategies of attention, and what those of the other ops share: small integers and names in, whole cases out.

Never element-wise draws on arrays. Every strategy yields `Input`: the case and the facts by which reports group.
Draws are ordered so that shrinking makes lengths, heads and features small first and the seed last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from oracle.formats import EIGHT_BITS, Float64Array, Format, StoredArray
from properties.inputs.recipes import (
    FAMILIES,
    GENERAL,
    KINDS,
    KINDS_OF_MASKS,
    OVER,
    Logits,
    Mask,
    Recipe,
    array,
    mask_array,
    plant,
)
from properties.ops.attention.options import NAMES, NONE, Extras, basic_values, drawn, facts, option_values
from properties.subject import Input, Subject

Draw = Callable[[st.SearchStrategy[Any]], Any]
SEEDS = st.integers(0, 999)
HEAD_DIMS = (16, 1, 8, 32, 40, 64, 80, 96, 128)
MASKS = st.builds(
    Mask,
    st.sampled_from(("bool", "additive")),
    st.sampled_from(("some", "first", "last", "far", "all but one")),
    st.sampled_from(OVER),
)


@cache
def lengths(largest: int) -> st.SearchStrategy[int]:
    """Sequence lengths: short ones, and both sides of the usual tile borders."""
    borders = [b + d for b in (16, 32, 64, 128, 256) for d in (-1, 0, 1) if b + d <= largest]
    return st.one_of(st.integers(1, min(12, largest)), st.sampled_from(borders or [largest]), st.integers(1, largest))


@st.composite
def attention(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = GENERAL,
    value_families: Sequence[str] = ("normal", "one_signed", "outliers", "alternating"),
    kinds: Sequence[str] = ("plain",),
    sizes: Sequence[float] = (0.0,),
    largest_q: int = 48,
    largest_k: int = 160,
    square: bool = False,
    causal: bool | None = None,
    mask: bool | None = None,
    scale: bool | None = None,
    grouped: bool | None = None,
    gains: Sequence[float] = (1.0,),
    options: Sequence[str] = NAMES,
    one: bool = False,
) -> Input:
    """Attention inputs. None for causal, mask, scale, grouped: drawn where there is the option; True, False: fixed.

    ``options`` names the further ones that may be drawn; with ``one`` at least one of them is, if the target has any.
    """
    slow = subject.target.interpreted
    sk = draw(lengths(min(largest_k, 80) if slow else largest_k))
    sq = sk if square else draw(lengths(min(largest_q, 24) if slow else largest_q))
    dims = draw(st.sampled_from(HEAD_DIMS[:6] if slow else HEAD_DIMS))
    kv_heads = draw(st.integers(1, 2))
    groups = (1,) if grouped is False or refuses(subject, "grouped_heads") else ((2, 3, 4) if grouped else (1, 2, 3))
    group = draw(st.sampled_from(groups))
    batch = draw(st.integers(1, 2))
    is_causal = subject.has("is_causal") and (draw(st.booleans()) if causal is None else causal)
    masked = subject.has("attn_mask") and not is_causal and (draw(st.booleans()) if mask is None else mask)
    scaled = subject.has("scale") and (draw(st.booleans()) if scale is None else scale)
    kind = draw(st.sampled_from(tuple(kinds)))
    size = draw(st.sampled_from(tuple(sizes)))
    gain = draw(st.sampled_from(tuple(gains)))
    q_recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), gain)
    v_recipe = Recipe(draw(st.sampled_from(tuple(value_families))), q_recipe.seed)
    extras = drawn(draw, subject, options, one=one)
    return attention_input(
        subject,
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        sq=sq,
        sk=sk,
        dims=dims,
        recipe=q_recipe,
        values=v_recipe,
        logits=Logits(kind, size),
        is_causal=is_causal,
        mask=draw(MASKS) if masked else None,
        scale=draw(st.sampled_from((0.3, 1.0, 0.01))) if scaled else None,
        extras=extras,
    )


def refuses(subject: Subject, limit: str) -> bool:
    """Whether the target states, or showed when probed, that it does not take such inputs."""
    return subject.conventions.get(limit) == "refused"


def taken(subject: Subject, mask: Mask) -> Mask:
    """The mask, of the next kind and form that the target takes."""
    kinds = (mask.kind, *KINDS_OF_MASKS)
    kind = next((k for k in kinds if not refuses(subject, KINDS_OF_MASKS[k])), mask.kind)
    over = next((o for o in (mask.over, *OVER) if not refuses(subject, f"mask_of_{o}")), mask.over)
    return replace(mask, kind=kind, over=over)


def attention_input(
    subject: Subject,
    *,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 1,
    sq: int = 1,
    sk: int = 1,
    dims: int = 16,
    value_dims: int | None = None,
    recipe: Recipe = Recipe(),
    values: Recipe = Recipe(),
    logits: Logits = Logits(),
    is_causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    extras: Extras = NONE,
    features: dict[str, Any] | None = None,
) -> Input:
    """One attention case from plain numbers. Options that the target lacks are left out, its conventions are used."""
    fmt = subject.fmt
    heads = kv_heads * group
    used = scale if scale is not None else 1.0 / float(np.sqrt(dims))
    q = array(recipe, (batch, heads, sq, dims), fmt, stream=0)
    k = array(recipe, (batch, kv_heads, sk, dims), fmt, stream=1)
    v = array(values, (batch, kv_heads, sk, value_dims or dims), fmt, stream=2)
    if logits.kind != "plain":
        planted = plant(q.astype(np.float64), k.astype(np.float64), used, logits, recipe.seed)
        q, k = (stored(x, fmt) for x in planted)
    options = basic_values(subject, is_causal=is_causal, scale=scale)
    if mask is not None and subject.has("attn_mask"):
        options["attn_mask"] = mask_array(taken(subject, mask), recipe.seed, (batch, heads, sq, sk), subject.wide)
    options |= option_values(subject, extras, batch=batch, heads=heads, kv_heads=kv_heads)
    case = Case("attention", {"q": q, "k": k, "v": v}, options)
    about = {
        "recipe": recipe.family,
        "values": values.family,
        "logits": logits.kind,
        "size": logits.size,
        "gain": recipe.gain,
        "seed": recipe.seed,
        "sk": sk,
        "sq": sq,
        "d": dims,
        "causal": bool(options.get("is_causal", False)),
        "mask": f"{mask.kind}, hides {mask.hides}, over {mask.over}" if "attn_mask" in options and mask else "",
    }
    return Input(case, about | facts(extras) | (features or {}))


def stored(x: Float64Array, fmt: Format) -> StoredArray:
    """x in the format; in 8 bits, whose range ends below some planted scores, what is too large becomes the largest."""
    return fmt.store(x, saturate=fmt.name in EIGHT_BITS)


ALL_FAMILIES, ALL_KINDS = tuple(FAMILIES), KINDS
