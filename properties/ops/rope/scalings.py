"""Parameters of scaled rotary frequencies: those of released models, neutral ones, and drawn ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.formats import StoredArray
from properties.inputs.recipes import Recipe
from properties.inputs.strategies import SEEDS, Draw
from properties.ops.rope.inputs import layouts_of, rope_input
from properties.subject import Input, Subject

Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Released:
    """The parameters that a published model configuration states: for its base and its width of rotation."""

    name: str
    base: float
    dims: int
    scaling: Parameters


_LLAMA = {
    "rope_type": "llama3", "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_DEEPSEEK = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
RELEASED: tuple[Released, ...] = (
    Released("Llama-3.1-8B", 500000.0, 128, {**_LLAMA, "factor": 8.0}),
    Released("Llama-3.2-1B", 500000.0, 64, {**_LLAMA, "factor": 32.0}),
    Released("DeepSeek-V3", 10000.0, 64, {**_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}),
    Released("DeepSeek-V2-Lite", 10000.0, 64, {**_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}),
    Released(
        "gpt-oss-20b", 150000.0, 64,
        {**_DEEPSEEK, "factor": 32.0, "truncate": False},
    ),
    Released(
        "Qwen3 at 131072", 1000000.0, 128,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    Released("LongChat-7B", 10000.0, 128, {"rope_type": "linear", "factor": 8.0}),
    Released("Qwen2-VL-7B", 1000000.0, 128, {"rope_type": "default", "mrope_section": [16, 24, 24]}),
    Released(
        "Qwen3-VL-8B", 5000000.0, 128,
        {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    ),
)  # fmt: skip


def longrope(pairs: int, trained: int, **more: Any) -> Parameters:
    """LongRoPE in the shape of the Phi-3 models' lists: factors that grow with the pair, the short ones near 1."""
    place = np.arange(pairs) / max(pairs - 1, 1)
    lists = {"short_factor": 1 + 0.9 * place**2, "long_factor": 1.03 + 60 * place**1.5}
    held = {name: [round(float(v), 4) for v in values] for name, values in lists.items()}
    return {"rope_type": "longrope", "original_max_position_embeddings": trained, "factor": 32.0, **held, **more}


def dynamic(trained: int, factor: float = 4.0, **more: Any) -> Parameters:
    return {"rope_type": "dynamic", "factor": factor, "max_position_embeddings": trained, **more}


def turned_by(scaling: Parameters, positions: StoredArray) -> StoredArray:
    """Positions [S] or [B, S] as the scaling wants them: three different axes if it has sections."""
    if scaling.get("mrope_section") is None:
        return positions
    return np.stack([positions, positions // 3 + 2, positions * 2 + 1])


def released_edges(subject: Subject) -> Iterator[Input]:
    """Every released configuration, at positions within, next to and far beyond its training."""
    near = np.array([0, 1, 257, 4095, 4096, 8191, 33000])
    for place, known in enumerate(RELEASED):
        yield rope_input(
            subject, dims=known.dims, base=known.base, scaling=known.scaling, recipe=Recipe(seed=place),
            positions=turned_by(known.scaling, near), features={"edge": "released", "model": known.name},
        )  # fmt: skip


def length_edges(subject: Subject) -> Iterator[Input]:
    """Rules that depend on the length: shorter than the training, equal to it, one more, much longer."""
    trained = 64
    for last in (5, trained - 1, trained, 5 * trained):
        positions = np.array([0, 3, last // 2, last])
        for scaling in (dynamic(trained), longrope(16, trained), dynamic(trained, 1.0)):
            yield rope_input(
                subject, dims=32, positions=positions, scaling=scaling, features={"edge": "length", "length": last + 1}
            )
    for stated in (trained, trained + 1, 1000):
        for scaling in (dynamic(trained, seq_len=stated), longrope(16, trained, seq_len=stated)):
            yield rope_input(
                subject, dims=32, positions=np.array([0, 7, 40]), scaling=scaling, features={"edge": "stated length"}
            )
    both = np.array([[0, 7, 40], [90, 100, 300]])
    for scaling in (dynamic(trained), longrope(16, trained), dynamic(trained, seq_len="sequence")):
        yield rope_input(subject, batch=2, dims=32, positions=both, scaling=scaling, features={"edge": "two lengths"})


def variant_edges(subject: Subject) -> Iterator[Input]:
    """Each key at a value that matters: other ramps, magnitudes as stated, by both rules, and both with sections."""
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
    scalings: list[Parameters] = [
        {**yarn, "ramp": "rotations"},
        {**yarn, "truncate": False},
        {**yarn, "beta_fast": 8.0, "beta_slow": 2.0},
        {**yarn, "attention_factor": 1.0},
        {**yarn, "attention_factor": 1.25},
        {**yarn, "mscale": 0.707, "mscale_all_dim": 0.3},
        {**yarn, "mscale": 0.707},
        {**yarn, "mscale": 0.707, "mscale_rule": "deepseek"},
        {**yarn, "factor": None, "max_position_embeddings": 6144},
        longrope(16, 64, attention_factor=1.5),
        {"rope_type": "linear", "factor": 2.5},
        {**_LLAMA, "factor": 8.0, "original_max_position_embeddings": 512, "high_freq_factor": 16.0},
        {"rope_type": "linear", "factor": 3.0, "mrope_section": [4, 6, 6]},
        {**yarn, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {"rope_type": "default", "mrope_section": [2, 10, 4]},
    ]
    for place, scaling in enumerate(scalings):
        positions = turned_by(scaling, np.array([0, 1, 50, 999, 3000]))
        for layout in layouts_of(subject):
            yield rope_input(
                subject, dims=32, positions=positions, scaling=scaling, layout=layout, recipe=Recipe(seed=place),
                features={"edge": "parameters"},
            )  # fmt: skip
    both = np.array([[0, 1, 50], [7, 300, 5000]])
    sections: Parameters = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    yield rope_input(
        subject, batch=2, dims=32, positions=turned_by(sections, both), scaling=sections, features={"edge": "sections"}
    )
    if subject.has("rotary_dim"):
        for scaling in (yarn, longrope(16, 64), {**_LLAMA, "factor": 8.0}, dynamic(64), sections):
            yield rope_input(
                subject, dims=48, rotary_dim=32, positions=turned_by(scaling, np.array([0, 1, 50, 999])),
                scaling=scaling,
                features={"edge": "partial"},
            )  # fmt: skip


def scaling_edges(subject: Subject) -> Iterator[Input]:
    yield from released_edges(subject)
    yield from length_edges(subject)
    yield from variant_edges(subject)


def neutral_edges(subject: Subject) -> Iterator[Input]:
    """Parameters that change nothing, within the length of the training."""
    ones = [1.0] * 16
    scalings: list[Parameters] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 1.0},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512, "ramp": "rotations"},
        {**_LLAMA, "factor": 1.0, "original_max_position_embeddings": 512},
        longrope(16, 512, short_factor=ones, attention_factor=1.0),
        dynamic(512),
        dynamic(512, 8.0),
    ]
    for place, scaling in enumerate(scalings):
        for last in (100, 511):
            yield rope_input(
                subject, dims=32, positions=np.array([0, 1, 37, last]), scaling=scaling, recipe=Recipe(seed=place),
                features={"edge": "neutral"},
            )  # fmt: skip


def interpolated_edges(subject: Subject) -> Iterator[Input]:
    """Whole factors, whose products with positions are exact."""
    for factor in (2, 8, 3, 10):
        scaling: Parameters = {"rope_type": "linear", "factor": float(factor)}
        yield rope_input(
            subject, dims=32, positions=np.array([0, 1, 37, 1000]), scaling=scaling,
            recipe=Recipe(seed=factor), features={"edge": "interpolated"},
        )  # fmt: skip


def traceless_edges(subject: Subject) -> Iterator[Input]:
    """Rules with a state in some implementations: calls on both sides of the length of the training."""
    for scaling in (dynamic(64), longrope(16, 64)):
        for last in (30, 300):
            yield rope_input(
                subject,
                dims=32,
                positions=np.array([0, 5, last]),
                scaling=scaling,
                features={"edge": "lengths in turn"},
            )


def decode_edges(subject: Subject) -> Iterator[Input]:
    """Sequences that start at 0, that continue, of two lengths; with scaling that does not depend on the length."""
    yield rope_input(subject, heads=2, dims=16, positions=np.arange(9), features={"edge": "from the start"})
    yield rope_input(subject, heads=2, dims=64, positions=np.arange(4090, 4103), features={"edge": "continued"})
    both = np.stack([np.arange(6), np.arange(6) + 500])
    yield rope_input(subject, batch=2, dims=16, positions=both, features={"edge": "two sequences"})
    if subject.has("scaling"):
        for scaling in (dict(RELEASED[0].scaling), longrope(16, 64, seq_len=100), dynamic(64, seq_len=100)):
            yield rope_input(
                subject, dims=32, positions=np.arange(55, 70), scaling=scaling, features={"edge": "scaled"}
            )


@st.composite
def scaled_rotations(draw: Draw, subject: Subject) -> Input:
    """Drawn parameters of every kind, positions on both sides of the length of the training."""
    pairs = draw(st.sampled_from((2, 4, 8, 10, 16, 32)))
    base = draw(st.sampled_from((10000.0, 500000.0, 1000.0))) if subject.has("base") else 10000.0
    trained = draw(st.sampled_from((64, 256, 1000, 4096)))
    scaling = draw(parameters(pairs, trained))
    s = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(SEEDS))
    far = draw(st.sampled_from((trained - 1, trained, 2 * trained, 8 * trained)))
    positions = np.append(rng.integers(0, far + 1, s - 1), far)
    return rope_input(
        subject, heads=draw(st.integers(1, 2)), dims=2 * pairs, base=base, positions=positions, scaling=scaling,
        recipe=Recipe(seed=draw(SEEDS)), layout=draw(st.sampled_from(layouts_of(subject))),
    )  # fmt: skip


@st.composite
def parameters(draw: Draw, pairs: int, trained: int) -> Parameters:
    """Parameters of any kind for so many pairs and that length of the training."""
    kind = draw(st.sampled_from(("linear", "dynamic", "yarn", "llama3", "longrope")))
    factor = draw(st.sampled_from((1.0, 2.0, 4.0, 3.7, 32.0)))
    match kind:
        case "linear":
            scaling: Parameters = {"rope_type": "linear", "factor": factor}
        case "dynamic":
            scaling = dynamic(trained, factor)
        case "yarn":
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
            scaling["ramp"] = draw(st.sampled_from(("dimension", "rotations")))
            scaling["truncate"] = draw(st.booleans())
            if draw(st.booleans()):
                scaling |= {"mscale": draw(st.sampled_from((1.0, 0.707))), "mscale_all_dim": 0.5}
        case "llama3":
            high = draw(st.sampled_from((4.0, 2.0, 20.0)))
            scaling = {**_LLAMA, "factor": factor, "high_freq_factor": high}
            scaling["original_max_position_embeddings"] = trained
        case _:
            scaling = longrope(pairs, trained, factor=factor)
    return scaling
