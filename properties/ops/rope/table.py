"""The properties of the rotary embedding: what is checked, on which inputs.

One row each in `PROPERTIES`, in `BACKWARD_PROPERTIES` for its gradient, which is a rotation too, and in
`APPLY_PROPERTIES` for the rotation by given tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oracle.ops.rope.case import turned_array, turned_name
from properties.inputs.real_input import captured_layers, load_layer
from properties.inputs.recipes import Recipe
from properties.judge.judgements import structure_only, within_bound
from properties.ops.rope import relations
from properties.ops.rope.inputs import BASES, applications, apply_input, layouts_of, rope_case, rope_input, rotations
from properties.ops.rope.scalings import (
    decode_edges,
    dynamic,
    interpolated_edges,
    neutral_edges,
    scaled_rotations,
    scaling_edges,
    traceless_edges,
)
from properties.property import Property
from properties.subject import Input, Subject

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}

# --- edge inputs -----------------------------------------------------------------------------------------------------


def position_sweep(subject: Subject) -> Iterator[Input]:
    """Positions 1, 2, 4 ... 2^24 and 2^17 - 1, four rows each, in every layout of the target."""
    step = 3 if subject.profile.name == "quick" or subject.target.interpreted else 1
    places = [2**exponent for exponent in range(0, 25, step)]
    for p in sorted({*places, 2**10, 2**17 - 1, 2**24}):
        for layout in layouts_of(subject):
            features = {"sweep": "position", "position": p}
            recipe = Recipe(seed=p.bit_length())
            yield rope_input(subject, s=4, dims=128, far=p, recipe=recipe, layout=layout, features=features)


def captured(subject: Subject) -> Iterator[Input]:
    """Queries and keys of a trained model before their rotation, at its base where the target takes one."""
    layout = layouts_of(subject)[0]
    for name in captured_layers():
        layer = load_layer(name)
        heads = 2 if subject.profile.name == "quick" or subject.target.interpreted else layer.q_pre.shape[0]
        rows = np.concatenate([layer.q_pre[:heads], layer.k_pre[: max(1, heads // 3)]]).astype(np.float64)
        if layout == "interleaved" and layer.rope_layout == "half":
            # The same pairs, where this layout has them.
            rows = np.stack(np.split(rows, 2, axis=-1), axis=-1).reshape(rows.shape)
        base = layer.rope_base if subject.has("base") else 10000.0
        x = subject.fmt.store(rows[None])
        yield rope_case(
            subject, x, np.arange(x.shape[2]), layout=layout, base=base, facts={"real": name, "recipe": "captured"}
        )


def magnitude_edges(subject: Subject) -> Iterator[Input]:
    """Entries near the largest number of the dtype, among its subnormals, and far apart within a pair."""
    fmt = subject.fmt
    for gain in (fmt.max_finite / 64, 1e4, 1e-4, fmt.smallest_normal, 4 * fmt.smallest_subnormal):
        yield rope_input(
            subject, s=3, dims=16, far=4096, recipe=Recipe("normal", 3, gain), features={"edge": "magnitude"}
        )
    for gain in (0.9 * fmt.max_finite, fmt.max_finite / 2, fmt.smallest_subnormal):
        yield rope_input(
            subject, s=3, dims=16, far=4096, recipe=Recipe("ones", 3, gain), features={"edge": "magnitude"}
        )
    made = rope_input(subject, s=3, dims=8, far=100, features={"edge": "unequal pairs"})
    x = turned_array(made.case).astype(np.float64) * np.where(np.arange(8) % 4 < 2, 1e4, 1e-4)
    yield Input(made.case.with_arrays(**{turned_name(made.case): fmt.store(x)}), made.features)


def at_zero(subject: Subject) -> Iterator[Input]:
    for dims in (2, 4, 64):
        for layout in layouts_of(subject):
            yield rope_input(
                subject,
                heads=2,
                dims=dims,
                positions=np.zeros(3, dtype=np.int64),
                layout=layout,
                features={"edge": "0"},
            )


def far_positions(subject: Subject) -> Iterator[Input]:
    """Single rows far out, two sequences at positions of their own, and a sequence that continues."""
    for p in (1, 257, 2049, 4096, 4097, 32768, 65537, 2**18, 2**20):
        yield rope_input(
            subject, dims=16, positions=np.array([p]), recipe=Recipe(seed=p % 997), features={"position": p}
        )
    yield rope_input(
        subject, batch=2, dims=16, positions=np.array([[0, 1, 2], [7, 300, 5000]]), features={"edge": "two sequences"}
    )
    yield rope_input(subject, dims=16, positions=np.arange(4095, 4100), features={"edge": "continued"})


def sums_of_positions(subject: Subject) -> Iterator[Input]:
    """Positions whose sums with half of themselves cross what 8 and 11 bits hold."""
    for p in (1, 100, 171, 1365, 2000, 3001, 44000):
        yield rope_input(
            subject, dims=16, positions=np.array([p, p + 1]), recipe=Recipe(seed=p % 997), features={"position": p}
        )


def neighbours(subject: Subject) -> Iterator[Input]:
    """The same vector at p and p + 1, from where 8, 11, 12 and 16 bits no longer tell them apart."""
    for p in (1, 257, 2049, 4097, 65537, 2**20 + 1):
        made = rope_input(
            subject,
            dims=16,
            positions=np.array([p, p + 1, p + 2]),
            recipe=Recipe(seed=p % 997),
            features={"position": p},
        )
        x = turned_array(made.case)
        same = np.broadcast_to(x[:, :, :1], x.shape).copy()
        yield Input(made.case.with_arrays(**{turned_name(made.case): same}), made.features)


def drift_sweep(subject: Subject) -> Iterator[Input]:
    """Queries and keys a few positions apart, moved together by 2^0 ... 2^20, and to both sides of 2^12 and 2^16."""
    step = 5 if subject.profile.name == "quick" or subject.target.interpreted else 1
    for exponent in range(0, 21, step):
        yield _moved_together(subject, 2**exponent, {"sweep": "drift", "position": 2**exponent})
    for t in (2**12 - 3, 2**16 - 3):
        yield _moved_together(subject, t, {"edge": "both sides", "position": t})
    if subject.has("scaling"):
        for scaling in (YARN, {"rope_type": "linear", "factor": 4.0}):
            yield _moved_together(subject, 1000, {"edge": "scaled", "position": 1000}, scaling=scaling)


def _moved_together(
    subject: Subject, t: int, features: dict[str, object], *, scaling: dict[str, object] | None = None
) -> Input:
    positions = np.array([0, 1, 5, 40])
    both = np.stack([positions, positions + t])
    made = rope_input(
        subject,
        batch=2,
        heads=2,
        dims=64,
        positions=both,
        recipe=Recipe(seed=t % 997),
        scaling=scaling,
        features=features,
    )
    x = np.broadcast_to(made.case.arrays["x"][:1], made.case.arrays["x"].shape).copy()
    return Input(made.case.with_arrays(x=x), made.features)


def option_edges(subject: Subject) -> Iterator[Input]:
    """Every option that the target has, at values far from its default."""
    common: dict[str, Any] = {"heads": 2, "s": 5, "dims": 32, "far": 300}
    if subject.has("base"):
        for base in (100.0, 500000.0, 12345.0):
            yield rope_input(subject, base=base, **common)
    for layout in layouts_of(subject):
        yield rope_input(subject, layout=layout, **common)
        if subject.has("rotary_dim"):
            for rotary_dim in (4, 8, 16, 24, 30):
                yield rope_input(subject, layout=layout, rotary_dim=rotary_dim, **common)
    if subject.has("scaling"):
        for scaling in ({"rope_type": "linear", "factor": 4.0}, YARN, dynamic(64)):
            yield rope_input(subject, scaling=scaling, **common)


def shape_edges(subject: Subject) -> Iterator[Input]:
    """Head dimensions and lengths on both sides of tile borders, odd numbers of pairs, single rows, many heads."""
    for dims in (2, 4, 6, 10, 14, 30, 34, 62, 66, 126, 128, 130, 256):
        for layout in layouts_of(subject):
            yield rope_input(
                subject, s=3, dims=dims, far=999, recipe=Recipe(seed=dims), layout=layout, features={"edge": "d"}
            )
    for s in (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129):
        yield rope_input(subject, s=s, dims=8, far=999, recipe=Recipe(seed=s), features={"edge": "rows"})
    for batch, heads in ((1, 5), (3, 1), (2, 3)):
        for per_batch in (False, True):
            yield rope_input(
                subject, batch=batch, heads=heads, s=4, far=99, per_batch=per_batch, features={"edge": "heads"}
            )
    if subject.has("rotary_dim"):
        for dims, rotary_dim in ((3, 2), (7, 4), (65, 64), (80, 32), (128, 2)):
            yield rope_input(subject, s=3, dims=dims, far=99, rotary_dim=rotary_dim, features={"edge": "partial"})


def dtype_edges(subject: Subject) -> Iterator[Input]:
    yield rope_input(subject, heads=2, s=3, dims=8)


def apply_edges(subject: Subject) -> Iterator[Input]:
    """Both sides of tile borders, odd numbers of pairs, rest entries."""
    for layout in layouts_of(subject):
        for pairs, rest in ((1, 0), (3, 1), (17, 2), (32, 0), (64, 0), (65, 3)):
            shape = (1, 2, 3, 2 * pairs + rest)
            yield apply_input(
                subject, shape=shape, pairs=pairs, recipe=Recipe(seed=pairs), layout=layout, features={"edge": "d"}
            )
    for s in (1, 15, 17, 64, 65):
        yield apply_input(
            subject,
            shape=(2, 1, s, 8),
            pairs=4,
            recipe=Recipe(seed=s),
            layout=layouts_of(subject)[0],
            features={"edge": "rows"},
        )


# --- searches --------------------------------------------------------------------------------------------------------


def _general(subject: Subject) -> st.SearchStrategy[Input]:
    return rotations(subject, bases=BASES)


def _far(subject: Subject) -> st.SearchStrategy[Input]:
    return rotations(subject, far=2**20, bases=BASES)


def _magnitudes(subject: Subject) -> st.SearchStrategy[Input]:
    fmt = subject.fmt
    return rotations(
        subject,
        gains=(fmt.max_finite / 1024, 1e3, 1e-3, fmt.smallest_normal),
        families=("normal", "massive", "one_signed", "tiny"),
    )


def _optional(subject: Subject) -> st.SearchStrategy[Input]:
    layouts = layouts_of(subject)[-1:]
    return rotations(
        subject, bases=BASES[1:], partial=subject.has("rotary_dim"), layouts=layouts, least_dims=8, far=2**10
    )


def _scaled(subject: Subject) -> st.SearchStrategy[Input]:
    return scaled_rotations(subject)


_SCALING = frozenset({"scaling"})


PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=_general, edges=captured),
    Property("P1", "error and angles by position", relations.with_angle_error, edges=position_sweep),
    Property("P9", "huge and tiny vectors", within_bound, search=_magnitudes, edges=magnitude_edges),
    Property(
        "P10",
        "any run of positions gives what the whole gives",
        relations.decoding,
        search=_general,
        edges=decode_edges,
    ),
    Property("P15", "no side effects, calls independent of each other", relations.pure, search=_general),
    Property(
        "P15",
        "a call of another length leaves no trace",
        relations.lengths_leave_no_trace,
        edges=traceless_edges,
        needs=_SCALING,
    ),
    Property("P16", "nothing turns at position 0", relations.identity, search=_general, edges=at_zero),
    Property("P16", "pairs keep their length", relations.norms_kept, search=_general),
    Property("P16", "a rotation and its inverse give the input", relations.inverse, search=_general),
    Property(
        "P16",
        "two rotations make one by the sum of positions",
        relations.composition,
        search=_far,
        edges=sums_of_positions,
    ),
    Property(
        "P16", "scores depend on the difference of positions alone", relations.relative_positions, edges=drift_sweep
    ),
    Property(
        "P16", "the complex product at log-spaced positions", relations.complex_form, search=_far, edges=far_positions
    ),
    Property(
        "P16",
        "both layouts are the same up to order",
        relations.layouts_agree,
        search=_general,
        needs=frozenset({"layout"}),
    ),
    Property("P16", "different positions rotate differently", relations.collisions, edges=neighbours),
    Property(
        "P17",
        "base, layout, rotary_dim and scaling matter and match the oracle",
        relations.options_matter,
        search=_optional,
        edges=option_edges,
    ),
    Property(
        "P18", "dimensions and lengths around tile borders, odd numbers of pairs", within_bound, edges=shape_edges
    ),
    Property(
        "P21",
        "frequencies and magnitude as the parameters say",
        within_bound,
        search=_scaled,
        edges=scaling_edges,
        needs=_SCALING,
    ),
    Property(
        "P21", "neutral parameters change nothing", relations.neutral_scaling, edges=neutral_edges, needs=_SCALING
    ),
    Property(
        "P21",
        "linear scaling divides positions",
        relations.interpolated,
        edges=interpolated_edges,
        needs=_SCALING,
    ),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=dtype_edges),
    Property("P25", "powers of two and signs pass through exactly", relations.scalings, search=_general),
)

# Scores are of rotated vectors, and the complex product is a form of the forward rotation.
_FORWARD_ONLY = (
    "scores depend on the difference of positions alone",
    "the complex product at log-spaced positions",
)
BACKWARD_PROPERTIES: tuple[Property, ...] = tuple(
    replace(row, id="P14" if row.id == "P1" else row.id) for row in PROPERTIES if row.title not in _FORWARD_ONLY
)

APPLY_PROPERTIES: tuple[Property, ...] = (
    Property("P1", "error within the contract's bound", within_bound, search=applications),
    Property("P15", "no side effects, calls independent of each other", relations.pure, search=applications),
    Property(
        "P18",
        "dimensions and lengths around tile borders, odd numbers of pairs",
        within_bound,
        edges=apply_edges,
    ),
    Property("P23", "dtype, shape and device of the output", structure_only, edges=apply_edges),
    Property("P25", "powers of two and signs pass through exactly", relations.scalings, search=applications),
)
