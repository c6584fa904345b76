"""What a case of attention would be if one of its options were misread: (what completes "as if", the other case).

An option that is ignored, and another of its published meanings, are told by the table itself
(`properties.ops.attention.options`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from oracle.case import Case
from oracle.ops.attention.case import scale_float
from oracle.ops.attention.options import DESCALES, taken

Others = Iterator[tuple[str, Case]]


def of_first(case: Case, axis: str, says: str, names: Sequence[str]) -> Others:
    """All heads, or sequences, have what the first has."""
    given = {name: case.options[name] for name in names if isinstance(case.options.get(name), np.ndarray)}
    first = taken(given, **{axis: [0]})
    if any(first[name].shape != a.shape for name, a in given.items()):
        yield says, case.with_options(**{name: np.broadcast_to(first[name], a.shape) for name, a in given.items()})


def windows(case: Case) -> Others:
    """Ends that are none, one key off, or each other's."""
    left, right = window = case.options["window_size"]
    ends = {
        "the window had no left end": (-1, right),
        "the window had no right end": (left, -1),
        "the window reached one key further to the left": (left + 1, right),
        "the window reached one key further to the right": (left, right + 1),
        "the window ended one key early on the left": (left - 1, right),
        "the window ended one key early on the right": (left, right - 1),
    }
    moved = {
        says: tuple(-1 if given == -1 else new for given, new in zip(window, other, strict=True))
        for says, other in ends.items()
    }
    for says, other in {**moved, "the ends of the window had changed places": (right, left)}.items():
        if min(other) >= -1 and other != tuple(window):
            yield says, case.with_options(window_size=other)


def slopes(case: Case) -> Others:
    """ALiBi negated, or of other heads and sequences."""
    given, names = case.options["alibi_slopes"], ("alibi_slopes",)
    yield "ALiBi had the wrong sign", case.with_options(alibi_slopes=-given)
    yield from of_first(case, "Hq", "all heads used the ALiBi slope of head 0", names)
    if given.shape[-1] > 1:
        yield "ALiBi slopes were in reverse order", case.with_options(alibi_slopes=given[..., ::-1])
    yield from of_first(case, "B", "all sequences used the ALiBi slopes of the first", names)


def sinks(case: Case) -> Others:
    """Sinks of another head, scaled, or counted more than once."""
    wide = case.options["sinks"].astype(np.float64)
    yield from of_first(case, "Hq", "all heads used the sink of head 0", ("sinks",))
    yield "the sink were scaled as scores are", case.with_options(sinks=wide * scale_float(case))
    for count in (2, 3, 4, 8):
        yield f"the sink were counted {count} times", case.with_options(sinks=wide + np.log(count))


def descales(case: Case) -> Others:
    """Factors of 8-bit storage left out, alone or together, or those of the first head for all."""
    given = [name for name in DESCALES if case.options.get(name) is not None]
    for name in given:
        if name != "k_descale":
            yield f"the factor of {name[0]} were ignored", case.without_options(name)
    if len(given) > 1:
        yield "the factors of q, k and v were ignored", case.without_options(*given)
    if {"k_descale", "v_descale"} <= set(given):
        yield "the factors of k and v were ignored", case.without_options("k_descale", "v_descale")
    yield from of_first(case, "Hkv", "all heads used the factors of head 0", given)
    yield from of_first(case, "B", "all sequences used the factors of the first", given)
