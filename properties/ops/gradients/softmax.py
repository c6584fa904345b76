"""The properties of softmax_backward: dx from a stored y and a cotangent. One row each in `PROPERTIES`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from oracle.formats import Float64Array
from properties.checks.metamorphic import full_bounds, observe, same_bits
from properties.inputs.recipes import GENERAL, Recipe, array
from properties.inputs.strategies import SEEDS, Draw, lengths
from properties.judge.judgements import SLACK, draw_of, kept, purity, structure_only, within_bound
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.property import Property
from properties.subject import Input, Subject

# --- inputs ----------------------------------------------------------------------------------------------------------


def backward_input(
    subject: Subject,
    *,
    lead: tuple[int, ...] = (1,),
    n: int = 1,
    recipe: Recipe = Recipe(),
    spread: float = 1.0,
    offset: float = 0.0,
    weights: bool = True,
    features: dict[str, object] | None = None,
) -> Input:
    """One case [*lead, n]: dy from the recipe plus ``offset``; y a stored softmax of logits of size ``spread``.

    Without ``weights`` y is any numbers, of both signs.
    """
    fmt = subject.fmt
    x = spread * np.random.default_rng([recipe.seed, 3]).standard_normal((*lead, n))
    with np.errstate(under="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True) if weights else x
    dy = array(recipe, (*lead, n), fmt, stream=1).astype(np.float64) + offset
    arrays = {"y": fmt.store(y), "dy": fmt.store(np.clip(dy, -fmt.max_finite, fmt.max_finite))}
    facts = {
        "recipe": recipe.family,
        "gain": recipe.gain,
        "seed": recipe.seed,
        "n": n,
        "spread": spread,
        "offset": offset,
        "weights": weights,
    }
    return Input(Case(subject.op, arrays), facts | (features or {}))


@st.composite
def rows(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = GENERAL,
    spreads: Sequence[float] = (1.0, 4.0, 12.0),
    offsets: Sequence[float] = (0.0,),
    gains: Sequence[float] = (1.0,),
    largest: int = 1024,
) -> Input:
    """Rows in two to four dimensions."""
    n = draw(lengths(min(largest, 160) if subject.target.interpreted else largest))
    count = draw(st.integers(1, 6))
    lead = draw(st.sampled_from(((count,), (2, count), (1, count), (count, 1, 2))))
    spread = draw(st.sampled_from(tuple(spreads)))
    offset = draw(st.sampled_from(tuple(offsets)))
    weights = draw(st.sampled_from((True, True, True, False)))
    recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), draw(st.sampled_from(tuple(gains))))
    return backward_input(subject, lead=lead, n=n, recipe=recipe, spread=spread, offset=offset, weights=weights)


def row_length_sweep(subject: Subject) -> Iterator[Input]:
    """Ever longer rows, to the profile's largest, flat and peaked."""
    longest = 512 if subject.target.interpreted else subject.profile.large
    n = 64
    while n <= longest:
        for spread in (1.0, 8.0):
            features = {"sweep": "context", "sk": n}
            yield backward_input(subject, lead=(4,), n=n, recipe=Recipe(seed=n), spread=spread, features=features)
        n *= 4


def range_edges(subject: Subject) -> Iterator[Input]:
    """Cotangents with a large common part, which cancels, and near either limit of the dtype."""
    fmt = subject.fmt
    for offset in (10.0, -100.0, 1000.0):
        yield backward_input(
            subject,
            lead=(3,),
            n=65,
            recipe=Recipe(seed=1),
            offset=offset,
            features={"sweep": "offset", "offset": offset},
        )
    for gain in (fmt.max_finite / 64, fmt.max_finite / 8, 1e3, 1e-3, fmt.smallest_normal, 4 * fmt.smallest_subnormal):
        yield backward_input(
            subject, lead=(2,), n=9, recipe=Recipe("one_signed", 2, gain), features={"edge": "magnitude"}
        )
    yield backward_input(subject, lead=(2,), n=40, recipe=Recipe(seed=4), spread=60.0, features={"edge": "one-hot y"})
    yield backward_input(subject, lead=(2,), n=40, recipe=Recipe("zeros"), features={"edge": "dy = 0"})


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Rows of 1, 2, 3 entries, both sides of tile borders, odd; numbers of rows likewise; up to four dimensions."""
    tiles = (16, 32, 64, 128, 256, 1024) if not subject.target.interpreted else (32, 64)
    for n in [1, 2, 3, 5, 77] + [t + d for t in tiles for d in (-1, 0, 1)]:
        yield backward_input(subject, lead=(2,), n=n, recipe=Recipe(seed=n), features={"edge": "n"})
    for count in (1, 3, 31, 33, 65):
        yield backward_input(subject, lead=(count,), n=19, recipe=Recipe(seed=count), features={"edge": "rows"})
    for lead in ((1, 1), (2, 3), (3, 1, 2), (1, 2, 1, 2)):
        yield backward_input(subject, lead=lead, n=7, recipe=Recipe(seed=len(lead)), features={"edge": "dimensions"})


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield backward_input(subject, lead=(2,), n=5)
    yield backward_input(subject, lead=(2, 3), n=5)


def exact_edges(subject: Subject) -> Iterator[Input]:
    """2^k equal weights and small integers: every product, sum and difference is an exact number of 8 bits."""
    for n in (1, 2, 4, 8, 16):
        dy = np.random.default_rng(n).integers(-3, 4, (3, n)).astype(np.float64)
        arrays = {"y": subject.fmt.store(np.full((3, n), 1.0 / n)), "dy": subject.fmt.store(dy)}
        yield Input(Case(subject.op, arrays), {"edge": "exact", "n": n})


# --- checks ----------------------------------------------------------------------------------------------------------


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: see `purity`; the other call has every row backwards, the larger one has both."""
    case = example.case
    other = {n: np.ascontiguousarray(a[..., ::-1]) for n, a in case.arrays.items()}
    both = {n: np.concatenate([other[n], a]) for n, a in case.arrays.items()}
    count = len(case.arrays["y"])
    return purity(subject, case, case.with_arrays(**other), case.with_arrays(**both), lambda dx: dx[:count])


def symmetries(subject: Subject, example: Input) -> Judgement:
    """P25: entries in another order; -dy gives -dx bit for bit; dy = 0 gives 0; a constant dy what is left of it."""
    case = example.case
    order = draw_of(case).permutation(case.arrays["y"].shape[-1])
    outputs = observe(subject, case)
    dx = outputs["dx"].astype(np.float64)
    moved = case.with_arrays(**{n: np.ascontiguousarray(a[..., order]) for n, a in case.arrays.items()})
    judged = [_permuted(subject, case, moved, dx, order)]
    negated = observe(subject, case.with_arrays(dy=-case.arrays["dy"]))["dx"].astype(np.float64)
    everywhere = np.ones((1,) * dx.ndim, dtype=bool)
    judged.append(same_bits(dx, -negated, everywhere, what="the cotangent negated"))
    nothing = observe(subject, case.with_arrays(dy=np.zeros_like(case.arrays["dy"])))["dx"].astype(np.float64)
    judged.append(same_bits(np.zeros_like(dx), nothing, everywhere, what="a cotangent of 0"))
    return worst_of(judged)


def _permuted(subject: Subject, case: Case, moved: Case, dx: Float64Array, order: Any) -> Judgement:
    seen = observe(subject, moved)
    back = np.argsort(order)
    found = seen["dx"].astype(np.float64)[..., back]
    with np.errstate(all="ignore"):
        gap = np.where(found == dx, 0.0, np.abs(found - dx))
        pairs = zip(
            full_bounds(subject, case, {"dx": seen["dx"]}), full_bounds(subject, moved, {"dx": seen["dx"]}), strict=True
        )
        rooms = [a["dx"] + b["dx"][..., back] + SLACK * np.abs(dx) for a, b in pairs]
    return kept(subject, gap, rooms, what="entries in another order", output="dx")


def exact_arithmetic(subject: Subject, example: Input) -> Judgement:
    """P28: no rounding happens, so every correct kernel is exact."""
    case = example.case
    y, dy = (case.arrays[n].astype(np.float64) for n in ("y", "dy"))
    exact = y * (dy - (y * dy).sum(axis=-1, keepdims=True))
    dx = observe(subject, case)["dx"].astype(np.float64)
    if np.array_equal(dx, exact):
        return Judgement(Verdict.PASS, Basis.EXACT, "exact")
    at = [int(i) for i in np.argwhere(dx != exact)[0]]
    detail = f"dx is not exact on exactly representable input, first at {at}"
    return Judgement(Verdict.FAIL, Basis.EXACT, detail, worst={"output": "dx", "index": at})


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return rows(subject)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    return rows(subject, offsets=(0.0, 30.0, -1e3, 1e4), gains=(1.0, 1e-4, 1e3), largest=300)


def _near(subject: Subject) -> st.SearchStrategy[Input]:
    return rows(subject, largest=300)


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=row_length_sweep),
    Property("P9", "common parts that cancel, the dtype's limits", within_bound, search=_ranges, edges=range_edges),
    Property("P15", "no side effects, calls independent of each other", pure, search=_general),
    Property("P18", "row lengths and counts around tile borders, odd", within_bound, edges=shape_edges),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=dtype_edges),
    Property("P25", "order of entries, sign of the cotangent", symmetries, search=_near),
    Property("P28", "exactly representable inputs give exact results", exact_arithmetic, edges=exact_edges),
)
