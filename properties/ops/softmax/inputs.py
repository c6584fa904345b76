"""Inputs of softmax, log_softmax and logsumexp: rows in up to five dimensions, planted logits, entries of -inf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from oracle.formats import Float64Array
from properties.inputs.recipes import GENERAL, Logits, Recipe, array
from properties.inputs.strategies import SEEDS, Draw, lengths
from properties.subject import Input, Subject

SHIFTS = (0.0, 5.0, -30.0, 300.0)


@st.composite
def rows(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = GENERAL,
    kinds: Sequence[str] = ("plain",),
    sizes: Sequence[float] = (0.0,),
    shifts: Sequence[float] = SHIFTS,
    holes: bool | None = None,
    least: int = 1,
    largest: int = 1024,
    several: bool = False,
) -> Input:
    """Rows in two to four dimensions. ``holes``: entries of -inf, drawn if None. ``several``: at least two rows."""
    n = draw(lengths(min(largest, 160) if subject.target.interpreted else largest))
    count = draw(st.integers(2 if several else 1, 6))
    lead = draw(st.sampled_from(((count,), (2, count), (1, count), (count, 1, 2))))
    kind = draw(st.sampled_from(tuple(kinds)))
    size = draw(st.sampled_from(tuple(sizes)))
    shift = draw(st.sampled_from(tuple(shifts)))
    gaps = draw(st.booleans()) if holes is None else holes
    recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS))
    return softmax_input(
        subject, lead=lead, n=max(n, least), recipe=recipe, logits=Logits(kind, size), shift=shift, holes=gaps
    )


def softmax_input(
    subject: Subject,
    *,
    lead: tuple[int, ...] = (1,),
    n: int = 1,
    recipe: Recipe = Recipe(),
    logits: Logits = Logits(),
    shift: float = 0.0,
    holes: bool = False,
    features: dict[str, object] | None = None,
) -> Input:
    """One case [*lead, n] from plain numbers; ``holes``: -inf in about a tenth of the entries, never in a whole row."""
    x = array(recipe, (*lead, n), subject.fmt).astype(np.float64)
    x = _planted(x, logits, recipe.seed) + shift
    x = np.clip(x, -subject.fmt.max_finite, subject.fmt.max_finite)
    if holes and n > 1:
        gaps = np.random.default_rng([recipe.seed, 5]).random(x.shape) < 0.1
        gaps[..., -1] |= ~gaps[..., :-1].any(axis=-1)
        gaps[..., 0] = False
        x = np.where(gaps, -np.inf, x)
    facts = {
        "recipe": recipe.family,
        "gain": recipe.gain,
        "seed": recipe.seed,
        "n": n,
        "logits": logits.kind,
        "size": logits.size,
        "shift": shift,
        "holes": holes,
    }
    return Input(Case(subject.op, {"x": subject.fmt.store(x)}), facts | (features or {}))


def _planted(x: Float64Array, logits: Logits, seed: int) -> Float64Array:
    n = x.shape[-1]
    index = np.arange(n)
    match logits.kind:
        case "plain":
            return x
        case "offset":
            return x + logits.size
        case "ascending":
            return x + logits.size * np.linspace(0.0, 1.0, n)
        case "descending":
            return x + logits.size * np.linspace(1.0, 0.0, n)
        case "peak":
            return np.asarray(x + logits.size * (index == seed % n))
        case "ties":
            return np.where(index % 3 == 0, logits.size, x)
    raise ValueError(f"unknown kind of logits {logits.kind!r}")


def exact_multiple(case: Case, limit: float) -> Case:
    """The case with every finite entry moved to a multiple of 1/4, at most ``limit``: room for exact shifts."""
    x = case.arrays["x"].astype(np.float64)
    moved = np.where(np.isfinite(x), np.clip(np.rint(4 * np.where(np.isfinite(x), x, 0.0)) / 4, -limit, limit), x)
    return case.with_arrays(x=moved.astype(case.arrays["x"].dtype))
