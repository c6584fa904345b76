"""The properties of a grouped-query attention block: what is checked, on which inputs. One row each in `PROPERTIES`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.inputs.recipes import GENERAL, Recipe, array
from properties.inputs.strategies import SEEDS, Draw
from properties.judge.judgements import structure_only, within_bound
from properties.judge.verdict import Judgement
from properties.ops.blocks.shared import causal, permuted_channels, pure, tables, weight, within_both
from properties.property import Property
from properties.subject import Input, Subject

READING = ("w_q", "w_k", "w_v")

# --- inputs ----------------------------------------------------------------------------------------------------------


def block_input(
    subject: Subject,
    *,
    batch: int = 1,
    length: int = 4,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    out: int | None = None,
    recipe: Recipe = Recipe(),
    peak: float = 1.0,
    features: dict[str, object] | None = None,
) -> Input:
    """One case from plain numbers; ``peak`` multiplies the scores."""
    fmt = subject.fmt
    arrays = {
        "x": array(recipe, (batch, length, width), fmt, stream=0),
        "w_q": weight(recipe, (heads * dim, width), fmt, 1, gain=peak),
        "w_k": weight(recipe, (kv_heads * dim, width), fmt, 2),
        "w_v": weight(recipe, (kv_heads * dim, width), fmt, 3),
        "w_o": weight(recipe, (width if out is None else out, heads * dim), fmt, 4),
        **tables(length, dim // 2, fmt),
    }
    facts = {
        "recipe": recipe.family,
        "gain": recipe.gain,
        "seed": recipe.seed,
        "sk": length,
        "d": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "peak": peak,
    }
    case = Case(subject.op, arrays, {"num_heads": heads, "num_kv_heads": kv_heads})
    return Input(case, facts | (features or {}))


@st.composite
def blocks(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = GENERAL,
    gains: Sequence[float] = (1.0, 3.0),
    peaks: Sequence[float] = (1.0, 4.0),
    least: int = 1,
) -> Input:
    length = draw(st.one_of(st.integers(least, 12), st.sampled_from((15, 16, 17, 33))))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    dim = draw(st.sampled_from((8, 2, 4, 16, 32)))
    width = draw(st.sampled_from((16, 5, 32, 48)))
    recipe = Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), draw(st.sampled_from(tuple(gains))))
    return block_input(
        subject,
        batch=draw(st.integers(1, 2)),
        length=length,
        width=width,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        recipe=recipe,
        peak=draw(st.sampled_from(tuple(peaks))),
    )


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    """Longer sequences and wider models, plain and with outlying channels."""
    longest = 64 if subject.profile.name == "quick" else 256
    length = 16
    while length <= longest:
        for family in ("normal", "massive_channels"):
            recipe = Recipe(family, length)
            yield block_input(subject, length=length, recipe=recipe, features={"sweep": "context"})
        length *= 4
    yield block_input(subject, length=9, width=256, heads=8, kv_heads=2, dim=32, features={"edge": "wide"})


def range_edges(subject: Subject) -> Iterator[Input]:
    """Scores from flat to one-hot, x from subnormal to the largest the projections hold."""
    for peak in (0.0, 10.0, 100.0, 1e3):
        yield block_input(
            subject,
            length=17,
            recipe=Recipe(seed=int(peak)),
            peak=peak,
            features={"sweep": "logits", "logit_size": peak},
        )
    fmt = subject.fmt
    for gain in (fmt.smallest_normal, 1e-3, 100.0, min(fmt.max_finite / 64, 1e30)):
        yield block_input(subject, length=5, recipe=Recipe("normal", 2, gain), features={"edge": "magnitude"})


def shape_edges(subject: Subject) -> Iterator[Input]:
    for n in [1, 2, 3] + [t + d for t in (16, 32, 64) for d in (-1, 0, 1)]:
        yield block_input(subject, length=n, recipe=Recipe(seed=n), features={"edge": "length"})
    for heads, kv_heads in ((1, 1), (3, 3), (3, 1), (6, 2), (6, 3), (5, 5), (8, 1)):
        yield block_input(
            subject, length=7, heads=heads, kv_heads=kv_heads, recipe=Recipe(seed=heads), features={"edge": "heads"}
        )
    for width, dim, out in ((1, 2, 1), (7, 2, 3), (33, 6, 65), (64, 10, 17), (40, 64, 40)):
        yield block_input(
            subject, length=9, width=width, dim=dim, out=out, recipe=Recipe(seed=width), features={"edge": "widths"}
        )
    for batch in (2, 3):
        yield block_input(subject, batch=batch, length=5, recipe=Recipe(seed=batch), features={"edge": "batch"})


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield block_input(subject, batch=2, length=3)


# --- checks ----------------------------------------------------------------------------------------------------------


def repeated_heads(subject: Subject, example: Input) -> Judgement:
    """P13: the weights of every KV head repeated for its group, as many KV heads as heads: the same result."""
    case = example.case
    heads, kv_heads = case.options["num_heads"], case.options["num_kv_heads"]
    repeated = {}
    for name in ("w_k", "w_v"):
        w = case.arrays[name]
        by_head = w.reshape(kv_heads, -1, w.shape[1])
        repeated[name] = np.ascontiguousarray(np.repeat(by_head, heads // kv_heads, axis=0).reshape(-1, w.shape[1]))
    other = replace(case.with_arrays(**repeated), options={**case.options, "num_kv_heads": heads})
    return within_both(subject, case, other, what="KV heads repeated for their groups")


def prefix(subject: Subject, example: Input) -> Judgement:
    """P10: the first rows alone give what they give inside the whole sequence."""
    case = example.case
    length = case.arrays["x"].shape[1]
    count = max(1, length // 2)
    shorter = case.with_arrays(
        x=np.ascontiguousarray(case.arrays["x"][:, :count]), **{n: case.arrays[n][:count] for n in ("cos", "sin")}
    )
    return within_both(subject, case, shorter, rows=slice(0, count), what=f"the first {count} rows alone")


def channels(subject: Subject, example: Input) -> Judgement:
    """P25: see `permuted_channels`."""
    return permuted_channels(subject, example, reading=READING)


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject, gains=(1.0, 1e-3, 30.0), peaks=(1.0, 10.0, 100.0))


def _long(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject, least=2)


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    Property("P4", "a row changes none before it", causal, search=_long),
    Property("P9", "scores from flat to one-hot, x of every size", within_bound, search=_ranges, edges=range_edges),
    Property("P10", "the first rows alone are those of the whole", prefix, search=_long),
    Property("P13", "grouped heads equal repeated ones", repeated_heads, search=_general),
    Property("P15", "no side effects, calls independent of each other", pure, search=_general),
    Property("P18", "lengths around tile borders, heads and widths of every kind", within_bound, edges=shape_edges),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=dtype_edges),
    Property("P25", "channels in another order", channels, search=_general),
)
