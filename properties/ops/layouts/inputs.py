"""Inputs of packed and of paged attention: lengths of a few sequences, heads, a page size, and attention's options.

Unused places of a cache hold ordinary numbers; that anything there must not matter is for P2 to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from oracle.formats import Format, StoredArray
from oracle.ops.layouts.case import PAGED
from properties.inputs.recipes import GENERAL, Logits, Recipe, array, plant
from properties.inputs.strategies import HEAD_DIMS, SEEDS, lengths, refuses
from properties.ops.attention.options import NAMES, NONE, Extras, basic_values, drawn, facts, option_values
from properties.subject import Input, Subject

Draw = Callable[[st.SearchStrategy[Any]], Any]
PAGE_SIZES = (16, 4, 64, 1)
Lengths = Sequence[tuple[int, int]]
"""(queries, keys) of each sequence; a paged call has as many queries in each."""


@st.composite
def layouts(
    draw: Draw,
    subject: Subject,
    *,
    kinds: Sequence[str] = ("plain",),
    sizes: Sequence[float] = (0.0,),
    largest: int = 70,
    several: bool = False,
    one: bool = False,
) -> Input:
    """One to four sequences, some of them empty; ``several``: at least two. ``one``: at least one further option."""
    count = draw(st.integers(2 if several else 1, 4 if subject.op != PAGED else 3))
    long = st.one_of(st.sampled_from((1, 0)), lengths(min(largest, 40) if subject.target.interpreted else largest))
    sq = draw(st.sampled_from((1, 2, 5, 17)))
    pairs = []
    for _ in range(count):
        keys = draw(long)
        queries = sq if subject.op == PAGED else draw(st.sampled_from((keys, 1, 3, 0)))
        pairs.append((queries, keys))
    if not any(queries for queries, _ in pairs):
        pairs[0] = (1, pairs[0][1])
    groups = (1,) if refuses(subject, "grouped_heads") else (1, 2, 3)
    seed = draw(SEEDS)
    return layout_input(
        subject,
        pairs,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from(groups)),
        dims=draw(st.sampled_from(HEAD_DIMS[:6])),
        page_size=draw(st.sampled_from(PAGE_SIZES)) if subject.op == PAGED else 16,
        recipe=Recipe(draw(st.sampled_from(GENERAL)), seed),
        logits=Logits(draw(st.sampled_from(tuple(kinds))), draw(st.sampled_from(tuple(sizes)))),
        is_causal=draw(st.booleans()) if subject.has("is_causal") else False,
        scale=draw(st.sampled_from((None, 0.3))) if subject.has("scale") else None,
        extras=drawn(draw, subject, NAMES, one=one),
    )


def layout_input(
    subject: Subject,
    pairs: Lengths,
    *,
    kv_heads: int = 1,
    group: int = 1,
    dims: int = 16,
    value_dims: int | None = None,
    page_size: int = 16,
    spare: int = 2,
    recipe: Recipe = Recipe(),
    logits: Logits = Logits(),
    is_causal: bool = False,
    scale: float | None = None,
    extras: Extras = NONE,
    features: dict[str, object] | None = None,
) -> Input:
    """One case from plain numbers; ``spare`` pages belong to nobody. Options that the target lacks are left out."""
    fmt, heads = subject.fmt, kv_heads * group
    used = scale if scale is not None else 1.0 / float(np.sqrt(dims))
    parts = [
        _sequence(recipe, n, (heads, queries, dims), (kv_heads, keys, dims, value_dims or dims), fmt, used, logits)
        for n, (queries, keys) in enumerate(pairs)
    ]
    arrays = _paged(parts, fmt, page_size, spare, recipe.seed) if subject.op == PAGED else _packed(parts, fmt)
    options = basic_values(subject, is_causal=is_causal, scale=scale)
    options |= option_values(subject, extras, batch=len(pairs), heads=heads)
    about = {
        "recipe": recipe.family,
        "logits": logits.kind,
        "size": logits.size,
        "seed": recipe.seed,
        "sequences": len(pairs),
        "sk": max(keys for _, keys in pairs),
        "sq": max(queries for queries, _ in pairs),
        "d": dims,
        "causal": bool(options.get("is_causal", False)),
    } | ({"page_size": page_size} if subject.op == PAGED else {})
    return Input(Case(subject.op, arrays, options), about | facts(extras) | (features or {}))


Parts = list[dict[str, StoredArray]]


def _sequence(
    recipe: Recipe,
    n: int,
    q_shape: tuple[int, int, int],
    kv_shape: tuple[int, int, int, int],
    fmt: Format,
    scale: float,
    logits: Logits,
) -> dict[str, StoredArray]:
    """q [Sq, Hq, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv] of sequence ``n``."""
    kv_heads, keys, dims, value_dims = kv_shape
    q = array(recipe, q_shape, fmt, stream=3 * n).astype(np.float64)
    k = array(recipe, (kv_heads, keys, dims), fmt, stream=3 * n + 1).astype(np.float64)
    if keys:
        q, k = plant(q, k, scale, logits, recipe.seed)
    v = array(Recipe("normal", recipe.seed), (kv_heads, keys, value_dims), fmt, stream=3 * n + 2)
    return {name: fmt.store(a.astype(np.float64)).transpose(1, 0, 2) for name, a in (("q", q), ("k", k), ("v", v))}


def _packed(parts: Parts, fmt: Format) -> dict[str, StoredArray]:
    arrays: dict[str, StoredArray] = {n: np.concatenate([p[n] for p in parts]) for n in ("q", "k", "v")}
    for name, of in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        arrays[name] = np.cumsum([0, *(len(p[of]) for p in parts)]).astype(np.int32)
    return arrays


def _paged(parts: Parts, fmt: Format, page_size: int, spare: int, seed: int) -> dict[str, StoredArray]:
    """Pages in random order; places that no sequence uses, and entries of the table behind its end, hold something."""
    rng = np.random.default_rng([seed, 5])
    counts = [-(-len(p["k"]) // page_size) for p in parts]
    pages = sum(counts) + spare
    order = rng.permutation(pages)
    table = rng.integers(0, pages, (len(parts), max(1, *counts))).astype(np.int32)
    arrays: dict[str, StoredArray] = {"q": np.stack([p["q"] for p in parts]).transpose(0, 2, 1, 3)}
    arrays["q"] = np.ascontiguousarray(arrays["q"])
    for name, of in (("k_cache", "k"), ("v_cache", "v")):
        _, heads, width = parts[0][of].shape
        cache = fmt.store(rng.standard_normal((pages, page_size, heads, width)))
        taken = 0
        for n, part in enumerate(parts):
            own = order[taken : taken + counts[n]]
            table[n, : counts[n]] = own
            taken += counts[n]
            for index, page in enumerate(own):
                piece = part[of][index * page_size : (index + 1) * page_size]
                cache[page, : len(piece)] = piece
        arrays[name] = cache
    arrays["block_table"] = table
    arrays["cache_seqlens"] = np.array([len(p["k"]) for p in parts], dtype=np.int32)
    return arrays
