"""Inputs of multi-head latent attention: small ranks, several heads, planted scores along the shared rotary key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.inputs.recipes import Logits, Recipe, array, plant
from properties.inputs.strategies import SEEDS, Draw, lengths
from properties.ops.attention.options import basic_values
from properties.subject import Input, Subject

Widths = tuple[int, int, int, int]


@st.composite
def latents(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = ("normal", "massive", "one_signed"),
    gains: Sequence[float] = (1.0,),
    kinds: Sequence[str] = ("plain",),
    sizes: Sequence[float] = (0.0,),
    causal: bool | None = None,
    scale: bool | None = None,
    largest_q: int = 24,
    largest_k: int = 96,
) -> Input:
    """Up to 4 heads, small ranks, several tiles of keys. None for causal, scale: drawn where there is the option."""
    sk, sq = draw(lengths(largest_k)), draw(lengths(largest_q))
    heads, batch = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    choices = ((8, 16, 32), (4, 8), (16, 24, 48), (8, 16, 24))
    d_h, d_r, d_c, d_v = (draw(st.sampled_from(c)) for c in choices)
    kind, size = draw(st.sampled_from(tuple(kinds))), draw(st.sampled_from(tuple(sizes)))
    recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), draw(st.sampled_from(tuple(gains))))
    is_causal = subject.has("is_causal") and (draw(st.booleans()) if causal is None else causal)
    scaled = subject.has("scale") and (draw(st.booleans()) if scale is None else scale)
    return mla_input(
        subject,
        batch=batch,
        heads=heads,
        sq=sq,
        sk=sk,
        widths=(d_h, d_r, d_c, d_v),
        recipe=recipe,
        logits=Logits(kind, size),
        is_causal=is_causal,
        scale=draw(st.sampled_from((0.3, 0.02))) if scaled else None,
    )


def mla_input(
    subject: Subject,
    *,
    batch: int = 1,
    heads: int = 1,
    sq: int = 1,
    sk: int = 1,
    widths: Widths = (8, 4, 16, 8),
    recipe: Recipe = Recipe(),
    latents: Recipe | None = None,
    logits: Logits = Logits(),
    is_causal: bool = False,
    scale: float | None = None,
    features: dict[str, object] | None = None,
) -> Input:
    """One case; widths (d_h, d_r, d_c, d_v). Projection weights are scaled by 1/sqrt(d_c) as trained ones are.

    ``recipe`` makes the queries, ``latents`` (default: normal, of the same seed) the rest. Options that the target
    lacks are left out.
    """
    d_h, d_r, d_c, d_v = widths
    rest = latents or Recipe("normal", recipe.seed)
    root = d_c**-0.5 if rest.family != "integers" else 1.0
    shapes: dict[str, tuple[tuple[int, ...], Recipe, float]] = {
        "q_nope": ((batch, heads, sq, d_h), recipe, 1.0),
        "q_pe": ((batch, heads, sq, d_r), recipe, 1.0),
        "c_kv": ((batch, sk, d_c), rest, 1.0),
        "k_pe": ((batch, sk, d_r), rest, 1.0),
        "w_uk": ((heads, d_h, d_c), rest, root),
        "w_uv": ((heads, d_v, d_c), rest, root),
    }
    wide = {
        name: array(r, shape, subject.fmt, stream=i).astype(np.float64) * factor
        for i, (name, (shape, r, factor)) in enumerate(shapes.items())
    }
    used = scale if scale is not None else (d_h + d_r) ** -0.5
    # [B, H, Sq, d_r] and [B, Sk, d_r]: one channel of the rotary part, which all heads share.
    wide["q_pe"], wide["k_pe"] = plant(wide["q_pe"], wide["k_pe"], used, logits, recipe.seed)
    options = basic_values(subject, is_causal=is_causal, scale=scale)
    top = subject.fmt.max_finite
    arrays = {name: subject.fmt.store(np.clip(values, -top, top)) for name, values in wide.items()}
    facts = {
        "recipe": recipe.family,
        "gain": recipe.gain,
        "logits": logits.kind,
        "size": logits.size,
        "seed": recipe.seed,
        "sk": sk,
        "sq": sq,
        "causal": bool(options.get("is_causal", False)),
    }
    return Input(Case("mla", arrays, options), facts | (features or {}))
