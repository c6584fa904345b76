"""Counterfactuals of rope, its gradient and rope_apply: layouts, positions, frequencies, tables, a base read off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block
from oracle.bounds.rope.frequency import frequencies_upper
from oracle.case import Case
from oracle.formats import FORMATS, Float64Array, Format, format_of
from oracle.ops.rope.case import (
    Rotation,
    clean_head,
    pair_positions,
    positions_of,
    rotation,
    sequence_length,
    size_of,
    turned_array,
    turned_name,
)
from properties.diagnosis import outputs
from properties.diagnosis.counterfactual import (
    Change,
    Counterfactual,
    FailingCase,
    Hypothesis,
    Predictions,
    Table,
    changed,
    of_case,
)
from properties.ops.rope.diagnosis_scaling import scalings
from properties.subject import Subject

BASES = (10000.0, 500000.0, 1000000.0, 100.0, 1000.0, 100000.0, 5000000.0, 8000000.0)
TABLE_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NARROW = ("fp16", "bf16", "tf32")


def pair_columns(how: Rotation, layout: str) -> NDArray[np.int64]:
    """Columns of all first entries, then of all second ones, then the rest."""
    d = how.rotary_dim
    turned = np.arange(d) if layout == "half" else np.concatenate([np.arange(0, d, 2), np.arange(1, d, 2)])
    return np.concatenate([turned, np.arange(d, how.dim)])


# --- layouts and widths ---


def layouts(failing: FailingCase) -> Iterator[Counterfactual]:
    case, how = failing.case, rotation(failing.case)
    other = "interleaved" if how.layout == "half" else "half"
    half = how.rotary_dim // 2
    own, theirs = pair_columns(how, how.layout), pair_columns(how, other)
    swapped = np.arange(how.dim)
    swapped[own[:half]], swapped[own[half : 2 * half]] = own[half : 2 * half], own[:half]
    moved = np.arange(how.dim)
    moved[theirs] = own
    yield of_case(f"the layout were {other}", case.with_options(layout=other))
    yield _reordered("the two entries of each pair were exchanged in the output", swapped)
    yield _reordered(f"pairs were read as {how.layout} and written as {other}", moved)


def _reordered(says: str, columns: NDArray[np.int64]) -> Counterfactual:
    return Counterfactual(says, arrange=lambda key, rows, a: a[:, columns] if a.shape[1] == len(columns) else a)


def widths(failing: FailingCase) -> Iterator[Counterfactual]:
    """Another part of the head rotated, or exponents made from another width."""
    case, how = failing.case, rotation(failing.case)
    if "scaling" in case.options:
        # Its parameters belong to the width and the base that are stated.
        return
    d, base = how.rotary_dim, how.base
    partly = "rotary_dim" in case.options and d < how.dim
    if partly and how.dim % 2 == 0:
        yield of_case("rotary_dim were ignored and everything rotated", case.with_options(rotary_dim=how.dim))
        yield of_case("exponents were 2i/D instead of 2i/rotary_dim", case.with_options(base=base ** (d / how.dim)))
        twice = max(d * d // how.dim // 2 * 2, 2)
        yield of_case("the rotated fraction were applied twice", case.with_options(rotary_dim=twice))
    if d > 2:
        yield of_case("only the first half of the pairs were rotated", case.with_options(rotary_dim=d // 4 * 2 or 2))
    yield of_case("exponents were i/d instead of 2i/d", case.with_options(base=base**0.5))
    yield of_case("exponents were 4i/d instead of 2i/d", case.with_options(base=base**2))
    if d > 2:
        yield of_case("exponents were 2i/(d - 2) instead of 2i/d", case.with_options(base=base ** (d / (d - 2))))


# --- positions ---


def positions(failing: FailingCase) -> Iterator[Counterfactual]:
    p = failing.case.arrays["positions"]
    largest = int(p.max(initial=0))

    def at(says: str, moved: object) -> Counterfactual:
        return of_case(says, failing.case.with_arrays(positions=np.asarray(moved, dtype=np.int64)))

    yield at("nothing were rotated", np.zeros_like(p))
    back = failing.case.op == "rope_backward"
    yield at("the gradient were rotated forward instead of back" if back else "the sign of sin were flipped", -p)
    yield at("positions counted from 0 in each call", p - p[..., :1])
    yield at("positions were 0, 1, 2, ... whatever is given", np.broadcast_to(np.arange(p.shape[-1]), p.shape))
    by_axis = rotation(failing.case).scaling.sections is not None
    if p.ndim == 2 and len(p) > 1 and not by_axis:
        yield at("all sequences used the positions of the first", np.broadcast_to(p[:1], p.shape))
    yield at("positions were one too large", p + 1)
    yield at("positions were one too small", p - 1)
    for name in ("bf16", "fp16"):
        rounded = FORMATS[name].round(p.astype(np.float64))
        made = at(f"positions were rounded to {name}", np.where(np.isfinite(rounded), rounded, 0))
        yield made if by_axis else replace(made, change=_overflowed(~np.isfinite(rounded)))
    for n in TABLE_LENGTHS:
        if largest >= n:
            yield at(f"positions beyond {n - 1} read the last row of a table of {n}", np.minimum(p, n - 1))
            yield at(f"positions wrapped around at {n}", p % n)


def _overflowed(lost: NDArray[np.bool_]) -> Change:
    """inf or NaN in the rows of positions that overflow; pairs only, the rest of a row does not turn."""

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        here = (lost if lost.ndim == 1 else lost[block.key[0]])[block.rows]
        return {
            s.main: p[s.main].marked(
                "breaks", here[:, None] & (np.arange(rotation(s.case).dim) < rotation(s.case).rotary_dim)
            )
        }

    return change


# --- bases ---


def base_ignored(failing: FailingCase) -> Iterator[Counterfactual]:
    if "base" in failing.case.options and "scaling" not in failing.case.options:
        yield of_case("base were ignored and 10000 used", failing.case.without_options("base"))


def bases(failing: FailingCase) -> Iterator[Counterfactual]:
    case, how = failing.case, rotation(failing.case)
    for base in BASES:
        if base != how.base and "scaling" not in case.options:
            yield of_case(f"the base were {base:g}", case.with_options(base=base))


def fitted_base(failing: FailingCase) -> Iterator[Counterfactual]:
    """The base that follows from the pair whose angle tells it best; asked of every element after that."""
    base = _read_base(failing)
    if base is not None and np.isfinite(base) and 1 < base < 1e12:
        yield _with_base(failing, base)


def _with_base(failing: FailingCase, base: float) -> Counterfactual:
    made = of_case(f"the base were about {float(f'{base:.4g}'):g}", failing.case.with_options(base=base))
    return replace(made, elsewhere=lambda other: _with_base(other, base))


def _read_base(failing: FailingCase) -> float | None:
    how = rotation(failing.case)
    if "scaling" in failing.case.options:
        return None
    pairs = how.rotary_dim // 2
    columns = pair_columns(how, how.layout)
    t = np.arange(pairs) / pairs
    best: tuple[float, float] | None = None
    for judged in failing.blocks:
        x, _ = clean_head(failing.case, judged.block.key, judged.block.rows)
        at = positions_of(failing.case, judged.block.key, judged.block.rows)[:, None].astype(np.float64)
        y = judged.values[failing.main]
        before, after = (a[:, columns[:pairs]] + 1j * a[:, columns[pairs : 2 * pairs]] for a in (x, y))
        room = np.hypot(*(judged.truth[0][failing.main].bound[:, columns[i * pairs : (i + 1) * pairs]] for i in (0, 1)))
        with np.errstate(all="ignore"):
            angle = np.angle(after / before)
            # Half a turn at most, so that no whole turn is lost; the error of ln base is that of the angle over t.
            known = (at * how.base**-t < 2.5) & (at > 0) & (t > 0) & (angle > 0) & np.isfinite(room)
            found = -np.log(angle / at) / t
            error = np.where(known, room / np.abs(before) / angle / t, np.inf)
        if error.size and np.isfinite(error.min()):
            place = np.unravel_index(int(np.argmin(error)), error.shape)
            if best is None or error[place] < best[0]:
                best = float(error[place]), float(np.exp(found[place]))
    return None if best is None else best[1]


# --- stages ---


def rounded_stages(failing: FailingCase) -> Iterator[Counterfactual]:
    """Frequencies, angles or tables in a narrow format, everything else exact."""
    for name in NARROW:
        fmt = FORMATS[name]
        yield changed(f"frequencies were rounded to {name}", _turned(failing, frequency=fmt), contract={"angle": name})
        yield changed(f"angles were rounded to {name}", _turned(failing, angle=fmt), contract={"angle": name})
        yield changed(f"cos and sin were stored in {name}", _turned(failing, table=fmt), contract={"table": name})


def _turned(
    failing: FailingCase, *, frequency: Format | None = None, angle: Format | None = None, table: Format | None = None
) -> Change:
    """The rotation in float64 with one stage rounded; its angles err by far less than any float32 bound allows."""
    how = rotation(failing.case)
    pairs = how.rotary_dim // 2
    columns = pair_columns(how, how.layout)
    size = 1.0 if failing.case.op == "rope_apply" else size_of(failing.case)

    def passed(fmt: Format | None, a: Float64Array) -> Float64Array:
        return a if fmt is None else fmt.round(a)

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        x, _ = clean_head(s.case, block.key, block.rows)
        if frequency is None and angle is None:
            cos, sin = block.part("cos").hi, block.part("sin").hi
        else:
            length = sequence_length(s.case, block.key)
            theta = passed(frequency, frequencies_upper(how.base, how.rotary_dim, how.scaling, length)[0])
            at = pair_positions(s.case, block.key, block.rows).astype(np.float64)
            turned = passed(angle, at * theta)
            with np.errstate(invalid="ignore"):
                # An angle that overflowed has no cosine.
                cos, sin = size * np.cos(turned), size * np.sin(turned)
        cos, sin = passed(table, cos), passed(table, sin)
        first, second = x[:, columns[:pairs]], x[:, columns[pairs : 2 * pairs]]
        value = x.copy()
        value[:, columns[:pairs]] = first * cos - second * sin
        value[:, columns[pairs : 2 * pairs]] = first * sin + second * cos
        lost = ~np.isfinite(value)
        return {s.main: p[s.main].at(np.where(lost, 0.0, value)).marked("breaks", lost)}

    return change


# --- tables that are given ---


def tables(failing: FailingCase) -> Iterator[Counterfactual]:
    """rope_apply: cos and sin used otherwise than given."""
    case = failing.case
    cos, sin = case.arrays["cos"], case.arrays["sin"]
    yield of_case("nothing were rotated", case.with_arrays(cos=np.ones_like(cos), sin=np.zeros_like(sin)))
    yield of_case("the sign of sin were flipped", case.with_arrays(sin=-sin))
    yield of_case("cos and sin had changed places", case.with_arrays(cos=sin, sin=cos))
    if len(cos) > 1:
        first = {n: np.ascontiguousarray(np.broadcast_to(a[:1], a.shape)) for n, a in (("cos", cos), ("sin", sin))}
        yield of_case("every row used the first row of the tables", case.with_arrays(**first))
    for name in NARROW:
        if FORMATS[name].precision < format_of(cos).precision:
            yield changed(
                f"cos and sin were rounded to {name}", _turned(failing, table=FORMATS[name]), contract={"table": name}
            )


# --- related cases and probes ---


def wider(case: Case) -> Iterator[Case]:
    """The same rows and some far out."""
    if case.op == "rope_apply" or turned_array(case).shape[2] > 64 or rotation(case).scaling.sections is not None:
        return
    x, p = turned_array(case), case.arrays["positions"]
    far = np.array([1, 17, 300, 2051, 4500, 70001], dtype=np.int64)
    more = p[..., -1:] + far if p.ndim == 1 else p[:, -1:] + far
    shape = (*x.shape[:2], x.shape[2] + len(far), x.shape[3])
    drawn = format_of(x).store(np.random.default_rng(8).standard_normal(shape))
    yield case.with_arrays(**{turned_name(case): drawn}, positions=np.concatenate([p, more], axis=-1))


def far_out(subject: Subject, case: Case) -> Case | None:
    """Single positions far out, for what a short sequence does not show."""
    p = case.arrays.get("positions")
    if p is None or rotation(case).scaling.sections is not None:
        return None
    steps = np.array([1, 257, 2049, 4097, 65537, 2**18 + 1])
    x = np.random.default_rng(9).standard_normal((*turned_array(case).shape[:2], len(steps), rotation(case).dim))
    at = steps if p.ndim == 1 else np.broadcast_to(steps, (len(p), len(steps)))
    return case.with_arrays(**{turned_name(case): subject.fmt.store(x)}, positions=np.ascontiguousarray(at))


_OUTPUT = (
    *outputs.WHOLE,
    Hypothesis("layout of heads", outputs.interleaved_heads),
)

HYPOTHESES = (
    Hypothesis("positions", positions),
    Hypothesis("layouts", layouts),
    Hypothesis("scaling", scalings),
    Hypothesis("base ignored", base_ignored),
    Hypothesis("widths", widths),
    Hypothesis("bases", bases),
    *_OUTPUT,
    Hypothesis("stages", rounded_stages),
    Hypothesis("narrow output", outputs.rounded_output),
    Hypothesis("fitted base", fitted_base),
)
APPLY_HYPOTHESES = (
    Hypothesis("tables", tables),
    Hypothesis("layouts", layouts),
    *_OUTPUT,
    Hypothesis("narrow output", outputs.rounded_output),
)

TABLES = {
    **dict.fromkeys(("rope", "rope_backward"), Table(HYPOTHESES, (("at positions far out: ", far_out),), wider=wider)),
    "rope_apply": Table(APPLY_HYPOTHESES),
}
