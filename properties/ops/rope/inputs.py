"""Inputs of the rotary embedding: positions spaced by powers of two, both layouts, partial rotations, other bases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from oracle.formats import FORMATS, StoredArray
from properties.inputs.recipes import Recipe, array
from properties.inputs.strategies import SEEDS, Draw
from properties.subject import Input, Subject

HALF_DIMS = (4, 1, 2, 8, 16, 20, 32, 64)
BASES = (10000.0, 500000.0, 100.0)


@st.composite
def rotations(
    draw: Draw,
    subject: Subject,
    *,
    far: int = 2**14,
    partial: bool | None = None,
    bases: Sequence[float] = (10000.0,),
    families: Sequence[str] = ("normal", "massive", "one_signed"),
    gains: Sequence[float] = (1.0,),
    layouts: Sequence[str] = (),
    least_dims: int = 2,
) -> Input:
    """[B, H, S, D] at positions up to a power of two, at most ``far``. None for partial: drawn if an option."""
    s = draw(st.integers(1, 12))
    dims = 2 * draw(st.sampled_from(tuple(d for d in HALF_DIMS if 2 * d >= least_dims)))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    exponent = draw(st.integers(0, int(np.log2(far))))
    per_batch = draw(st.booleans())
    recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), draw(st.sampled_from(tuple(gains))))
    rotary = None
    if subject.has("rotary_dim") and dims > 2 and (draw(st.booleans()) if partial is None else partial):
        rotary = 2 * draw(st.integers(1, dims // 2 - 1))
    base = draw(st.sampled_from(tuple(bases))) if subject.has("base") else 10000.0
    return rope_input(
        subject,
        batch=batch,
        heads=heads,
        s=s,
        dims=dims,
        far=2**exponent,
        per_batch=per_batch,
        recipe=recipe,
        layout=draw(st.sampled_from(tuple(layouts) or layouts_of(subject))),
        rotary_dim=rotary,
        base=base,
    )


def layouts_of(subject: Subject) -> tuple[str, ...]:
    """The layouts to ask of a target: its declared or probed one, or both where it takes the option."""
    stated = subject.conventions.get("layout")
    if stated is not None:
        return (stated,)
    return ("half", "interleaved") if subject.has("layout") else ("half",)


def rope_input(
    subject: Subject,
    *,
    batch: int = 1,
    heads: int = 1,
    s: int = 1,
    dims: int = 8,
    far: int = 1,
    per_batch: bool = False,
    recipe: Recipe = Recipe(),
    layout: str | None = None,
    rotary_dim: int | None = None,
    base: float = 10000.0,
    positions: StoredArray | None = None,
    scaling: dict[str, object] | None = None,
    features: dict[str, object] | None = None,
) -> Input:
    """One case; positions (if not given) from 0 to ``far``, ``far`` itself last, different per batch entry if asked."""
    if positions is None:
        rng = np.random.default_rng([recipe.seed, 3])
        shape = (batch, s) if per_batch else (s,)
        positions = rng.integers(0, far + 1, shape)
        positions[..., -1] = far
    x = array(recipe, (batch, heads, positions.shape[-1], dims), subject.fmt)
    facts = {"recipe": recipe.family, "gain": recipe.gain, "seed": recipe.seed, **(features or {})}
    return rope_case(
        subject, x, positions, layout=layout, rotary_dim=rotary_dim, base=base, scaling=scaling, facts=facts
    )


def rope_case(
    subject: Subject,
    x: StoredArray,
    positions: StoredArray,
    *,
    layout: str | None = None,
    rotary_dim: int | None = None,
    base: float = 10000.0,
    scaling: dict[str, Any] | None = None,
    facts: dict[str, object] | None = None,
) -> Input:
    """The case of given arrays: x [B, H, S, D] (dy of the gradient) in the subject's storage dtype, positions [S] or
    [B, S]; [3, S] or [3, B, S] where the scaling has sections."""
    options: dict[str, object] = {"layout": layout or layouts_of(subject)[0]}
    if rotary_dim is not None:
        options["rotary_dim"] = rotary_dim
    if base != 10000.0:
        options["base"] = base
    if scaling is not None:
        options["scaling"] = scaling
    turned = "dy" if subject.op == "rope_backward" else "x"
    case = Case(subject.op, {turned: x, "positions": positions.astype(np.int64)}, options)
    known: dict[str, object] = {"position": int(np.max(positions)), "d": x.shape[-1], "layout": options["layout"]}
    if scaling is not None:
        known["rope_type"] = scaling["rope_type"]
    return Input(case, known | (facts or {}))


@st.composite
def applications(draw: Draw, subject: Subject) -> Input:
    """Inputs of rope_apply: x and tables of positions up to 2^14, both in the subject's dtype."""
    s, pairs = draw(st.integers(1, 12)), draw(st.sampled_from(HALF_DIMS))
    dims = 2 * pairs + draw(st.sampled_from((0, 0, 1, 6)))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    recipe = Recipe(draw(st.sampled_from(("normal", "massive", "one_signed"))), draw(SEEDS))
    layout = draw(st.sampled_from(layouts_of(subject)))
    return apply_input(subject, shape=(batch, heads, s, dims), pairs=pairs, far=2**14, recipe=recipe, layout=layout)


def apply_input(
    subject: Subject,
    *,
    shape: tuple[int, int, int, int],
    pairs: int,
    far: int = 64,
    recipe: Recipe = Recipe(),
    layout: str = "half",
    features: dict[str, object] | None = None,
) -> Input:
    """One case of rope_apply: x ``shape`` = [B, H, S, D], tables [S, pairs] of positions up to ``far`` at base 1e4."""
    positions = np.random.default_rng([recipe.seed, 3]).integers(0, far + 1, shape[2])
    angle = positions[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    fmt = FORMATS[subject.dtype]
    arrays = {"x": array(recipe, shape, fmt), "cos": fmt.store(np.cos(angle)), "sin": fmt.store(np.sin(angle))}
    facts = {"recipe": recipe.family, "seed": recipe.seed, "d": shape[3], "layout": layout}
    return Input(Case("rope_apply", arrays, {"layout": layout}), facts | (features or {}))
