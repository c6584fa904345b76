"""The properties of a block of multi-head latent attention: what is checked, on which inputs; rows in `PROPERTIES`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.case import Case
from properties.inputs.recipes import GENERAL, Recipe, array
from properties.inputs.strategies import SEEDS, Draw
from properties.judge import judgements as judging
from properties.judge.judgements import structure_only, within_bound
from properties.judge.verdict import Judgement
from properties.ops.blocks.shared import causal, permuted_channels, pure, weight, within_both
from properties.ops.rope.scalings import RELEASED, dynamic, longrope, parameters
from properties.property import Property
from properties.subject import Input, Subject

READING = ("w_dkv", "w_kr", "w_dq")
WIDTHS = (8, 8, 16, 8, 12)
"""d_h, d_v, d_c, d_r, d_c' of an ordinary case."""
LAYOUTS = ("half", "interleaved")
DEEPSEEK: dict[str, object] = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "mscale": 0.5,
    "mscale_all_dim": 1.0,
}  # fmt: skip
"""YaRN as DeepSeek's layers take it, with a ramp among four pairs."""
_LLAMA: dict[str, object] = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip

# --- inputs ----------------------------------------------------------------------------------------------------------


def block_input(
    subject: Subject,
    *,
    batch: int = 1,
    length: int = 4,
    width: int = 24,
    heads: int = 2,
    widths: tuple[int, int, int, int, int] = WIDTHS,
    recipe: Recipe = Recipe(),
    peak: float = 1.0,
    start: int = 0,
    stride: int = 1,
    each: bool = False,
    norms: bool = False,
    options: dict[str, Any] | None = None,
    features: dict[str, object] | None = None,
) -> Input:
    """One case from plain numbers; ``norms`` and options are left out where the target lacks them.

    ``peak`` multiplies the scores, ``start`` is the first position, ``stride`` what separates
    positions, ``each`` gives each sequence positions of its own.
    """
    fmt, (d_h, d_v, d_c, d_r, d_cq) = subject.fmt, widths
    shapes = {
        "w_dkv": (d_c, width),
        "w_uk": (heads, d_h, d_c),
        "w_uv": (heads, d_v, d_c),
        "w_kr": (d_r, width),
        "w_dq": (d_cq, width),
        "w_uq": (heads, d_h, d_cq),
        "w_qr": (heads, d_r, d_cq),
        "w_o": (width, heads * d_v),
    }
    positions = start + stride * np.arange(length, dtype=np.int64)
    if each:
        positions = np.stack([positions + 7 * b for b in range(batch)])
    arrays = {"x": array(recipe, (batch, length, width), fmt, stream=0), "positions": positions}
    for stream, (name, shape) in enumerate(shapes.items(), start=1):
        gain = peak if name in ("w_uq", "w_qr") else 1.0
        arrays[name] = weight(recipe, shape, fmt, stream, gain=gain)
    chosen = {n: v for n, v in (options or {}).items() if subject.has(n)}
    if subject.has("num_heads"):
        chosen["num_heads"] = heads
    if norms and subject.has("norm_kv") and subject.has("norm_q"):
        rng = np.random.default_rng([recipe.seed, 8])
        chosen["norm_kv"] = fmt.store(1 + 0.3 * rng.standard_normal(d_c))
        chosen["norm_q"] = fmt.store(1 + 0.3 * rng.standard_normal(d_cq))
    facts = {
        "recipe": recipe.family,
        "gain": recipe.gain,
        "seed": recipe.seed,
        "sk": length,
        "heads": heads,
        "widths": list(widths),
        "width": width,
        "peak": peak,
        "start": start,
        "stride": stride,
        "norms": "norm_kv" in chosen,
        "scaling": None if chosen.get("scaling") is None else chosen["scaling"]["rope_type"],
    }
    return Input(Case(subject.op, arrays, chosen), facts | (features or {}))


@st.composite
def blocks(
    draw: Draw,
    subject: Subject,
    *,
    families: Sequence[str] = GENERAL,
    gains: Sequence[float] = (1.0, 3.0),
    peaks: Sequence[float] = (1.0, 4.0),
    least: int = 1,
    options: bool = False,
) -> Input:
    length = draw(st.one_of(st.integers(least, 12), st.sampled_from((15, 16, 17, 33))))
    widths = draw(st.sampled_from((WIDTHS, (1, 2, 3, 2, 2), (16, 8, 32, 4, 5), (5, 7, 9, 16, 24))))
    chosen: dict[str, object] = {}
    if options:
        chosen = {
            "base": draw(st.sampled_from((500.0, 1e5))),
            "scale": draw(st.sampled_from((1.0, 0.05))),
            "layout": draw(st.sampled_from(LAYOUTS)),
        }
    return block_input(
        subject,
        batch=draw(st.integers(1, 2)),
        length=length,
        width=draw(st.sampled_from((16, 5, 32))),
        heads=draw(st.integers(1, 3)),
        widths=widths,
        recipe=Recipe(draw(st.sampled_from(tuple(families))), draw(SEEDS), draw(st.sampled_from(tuple(gains)))),
        peak=draw(st.sampled_from(tuple(peaks))),
        start=draw(st.sampled_from((0, 1, 100))),
        each=draw(st.booleans()),
        norms=draw(st.booleans()),
        options=chosen,
    )


def accuracy_edges(subject: Subject) -> Iterator[Input]:
    """Longer sequences and wider latents, with and without norms."""
    longest = 64 if subject.profile.name == "quick" else 256
    length = 16
    while length <= longest:
        for norms in (False, True):
            yield block_input(
                subject, length=length, recipe=Recipe(seed=length), norms=norms, features={"sweep": "context"}
            )
        length *= 4
    wide = (32, 32, 128, 16, 96)
    yield block_input(subject, length=9, width=128, widths=wide, norms=True, features={"edge": "wide"})


def range_edges(subject: Subject) -> Iterator[Input]:
    """Scores from flat to one-hot; x from subnormal to what the projections hold, with the norms and without."""
    for peak in (0.0, 10.0, 100.0, 1e3):
        yield block_input(
            subject,
            length=17,
            recipe=Recipe(seed=int(peak)),
            peak=peak,
            features={"sweep": "logits", "logit_size": peak},
        )
    fmt = subject.fmt
    for gain in (fmt.smallest_normal, 1e-3, 100.0, min(fmt.max_finite / 64, 1e15)):
        for norms in (False, True):
            yield block_input(
                subject, length=5, recipe=Recipe("normal", 2, gain), norms=norms, features={"edge": "magnitude"}
            )


def shape_edges(subject: Subject) -> Iterator[Input]:
    for n in [1, 2, 3] + [t + d for t in (16, 32) for d in (-1, 0, 1)]:
        yield block_input(subject, length=n, recipe=Recipe(seed=n), features={"edge": "length"})
    for heads in (1, 3, 5):
        yield block_input(subject, length=7, heads=heads, recipe=Recipe(seed=heads), features={"edge": "heads"})
    for widths in ((1, 1, 1, 2, 1), (3, 5, 7, 6, 11), (16, 4, 33, 2, 5), (4, 16, 8, 32, 64)):
        yield block_input(
            subject, length=9, width=13, widths=widths, recipe=Recipe(seed=sum(widths)), features={"edge": "widths"}
        )
    for batch in (2, 3):
        yield block_input(subject, batch=batch, length=5, recipe=Recipe(seed=batch), features={"edge": "batch"})


def option_edges(subject: Subject) -> Iterator[Input]:
    """Each option far from its default, and positions that continue and differ between sequences."""
    common: dict[str, Any] = {"length": 9, "recipe": Recipe(seed=17)}
    for name, value in (("base", 100.0), ("scale", 1.0), ("layout", "interleaved")):
        if subject.has(name):
            yield block_input(subject, options={name: value}, **common)
    if subject.has("scaling"):
        yield block_input(subject, options={"scaling": {"rope_type": "linear", "factor": 4.0}}, **common)
        yield block_input(subject, options={"scaling": DEEPSEEK}, stride=40, **common)
    yield block_input(subject, norms=True, **common)
    if subject.has("eps"):
        small = Recipe("normal", 17, 0.03)
        yield block_input(subject, norms=True, options={"eps": 1e-2}, length=9, recipe=small)
    yield block_input(subject, start=1000, **common)
    yield block_input(subject, start=5, each=True, batch=2, **common)


def scaling_edges(subject: Subject) -> Iterator[Input]:
    """Every kind up to the training and beyond it; DeepSeek's YaRN with magnitudes in the tables and in the scale."""
    known = {r.name: r for r in RELEASED}
    for name, start in (("DeepSeek-V3", 4090), ("DeepSeek-V3", 100_000), ("DeepSeek-V2-Lite", 4090)):
        yield block_input(
            subject, length=7, widths=(16, 8, 24, known[name].dims, 16), recipe=Recipe(seed=start), start=start,
            stride=1 + start // 1000, norms=True, options={"scaling": dict(known[name].scaling), "base": 10000.0},
            features={"edge": "released", "model": name},
        )  # fmt: skip
    for more in (
        {"mscale": 0.707},
        {"mscale": None},
        {"mscale": 0.1, "mscale_rule": "deepseek"},
        {"ramp": "rotations"},
    ):
        yield block_input(
            subject, length=9, recipe=Recipe(seed=3), stride=30, options={"scaling": {**DEEPSEEK, **more}},
            features={"edge": "magnitude"},
        )  # fmt: skip
    for start in (55, 300):
        for scaling in (dynamic(64), longrope(4, 64), _LLAMA):
            yield block_input(
                subject, length=10, start=start, recipe=Recipe(seed=4), options={"scaling": scaling},
                features={"edge": "length"},
            )  # fmt: skip


def steady_edges(subject: Subject) -> Iterator[Input]:
    """Rules that do not depend on the length of the call, beyond the training."""
    for place, scaling in enumerate((DEEPSEEK, _LLAMA, dynamic(64, seq_len=500), longrope(4, 64, seq_len=500))):
        yield block_input(
            subject, length=7, start=200, stride=5, recipe=Recipe(seed=place), options={"scaling": scaling},
            features={"edge": "scaled"},
        )  # fmt: skip


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield block_input(subject, batch=2, length=3)


# --- checks ----------------------------------------------------------------------------------------------------------


def options_matter(subject: Subject, example: Input) -> Judgement:
    """P17."""
    names = [name for name in example.case.options if name != "num_heads"]
    return judging.options_matter(subject, example, names=names, widest=True)


def prefix(subject: Subject, example: Input) -> Judgement:
    """P10: the first rows alone, and the last row after any others, give what they give inside the whole sequence.

    A row is a function of its own x and of the latents before it, which are what a decoder keeps.
    """
    case = example.case
    count = max(1, case.arrays["x"].shape[1] // 2)
    shorter = case.with_arrays(
        x=np.ascontiguousarray(case.arrays["x"][:, :count]),
        positions=np.ascontiguousarray(case.arrays["positions"][..., :count]),
    )
    return within_both(subject, case, shorter, rows=slice(0, count), what=f"the first {count} rows alone")


def moved_along(subject: Subject, example: Input) -> Judgement:
    """P16: all positions moved by the same amount give the same result: scores depend on differences alone."""
    case = example.case
    moved = case.with_arrays(positions=case.arrays["positions"] + 64)
    return within_both(subject, case, moved, what="all positions 64 further")


def pure_in_batch(subject: Subject, example: Input) -> Judgement:
    """P15: see `pure`; positions are those of one sequence, so that the larger batch can share them."""
    case = example.case
    positions = case.arrays["positions"]
    return pure(
        subject, replace(example, case=case.with_arrays(positions=positions if positions.ndim == 1 else positions[0]))
    )


def channels(subject: Subject, example: Input) -> Judgement:
    """P25: see `permuted_channels`."""
    return permuted_channels(subject, example, reading=READING)


@st.composite
def scaled_blocks(draw: Draw, subject: Subject) -> Input:
    """Drawn parameters of every kind, positions on both sides of the length of the training."""
    trained = draw(st.sampled_from((64, 256, 4096)))
    widths = draw(st.sampled_from((WIDTHS, (5, 7, 9, 16, 24))))
    return block_input(
        subject, length=draw(st.integers(2, 9)), heads=draw(st.integers(1, 2)), widths=widths,
        norms=draw(st.booleans()),
        recipe=Recipe(seed=draw(SEEDS)), start=draw(st.sampled_from((0, trained - 3, 2 * trained, 9 * trained))),
        stride=draw(st.sampled_from((1, 7, trained // 4))),
        options={"scaling": draw(parameters(widths[3] // 2, trained)), "layout": draw(st.sampled_from(LAYOUTS))},
    )  # fmt: skip


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject)


def _ranges(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject, gains=(1.0, 1e-3, 30.0), peaks=(1.0, 10.0, 100.0))


def _scaled(subject: Subject) -> st.SearchStrategy[Input]:
    return scaled_blocks(subject)


def _long(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject, least=2)


def _optional(subject: Subject) -> st.SearchStrategy[Input]:
    return blocks(subject, options=True, least=3)


_SCALING = frozenset({"scaling"})
PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=accuracy_edges),
    Property("P4", "a row changes none before it", causal, search=_long),
    Property("P9", "scores from flat to one-hot, x of every size", within_bound, search=_ranges, edges=range_edges),
    Property("P10", "the first rows alone are those of the whole", prefix, search=_long),
    Property("P15", "no side effects, calls independent of each other", pure_in_batch, search=_general),
    Property("P16", "all positions moved alike change nothing", moved_along, search=_long),
    Property("P10", "the first rows alone, with scaled frequencies", prefix, edges=steady_edges, needs=_SCALING),
    Property(
        "P16", "all positions moved alike, with scaled frequencies", moved_along, edges=steady_edges, needs=_SCALING
    ),
    Property(
        "P17", "every option matters and matches the oracle", options_matter, search=_optional, edges=option_edges
    ),
    Property("P18", "lengths around tile borders, heads and widths of every kind", within_bound, edges=shape_edges),
    Property(
        "P21",
        "frequencies, magnitude and scale as the parameters say",
        within_bound,
        search=_scaled,
        edges=scaling_edges,
        needs=_SCALING,
    ),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=dtype_edges),
    Property("P25", "channels in another order", channels, search=_general),
)
