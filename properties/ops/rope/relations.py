"""Checks of the rotary embedding: the algebra of rotations, layouts, collisions, options, scalings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mpmath import MPContext
from numpy.typing import NDArray

from oracle.bounds.rope.rotation import relative_bound
from oracle.case import Case
from oracle.formats import Float64Array, StoredArray
from oracle.ops.rope.case import output_name, rotation, size_of, turned_array, turned_name
from properties.checks.metamorphic import agree, exact_output, full_bounds, observe, same_bits
from properties.judge import judgements as judging
from properties.judge.judgements import SLACK, all_bits, draw_of, kept, purity
from properties.judge.pipeline import certify
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.ops.rope.inputs import layouts_of
from properties.subject import Input, Subject


def pairs_of(case: Case) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Columns of the first and of the second entries of all pairs."""
    how = rotation(case)
    columns = np.arange(how.rotary_dim)
    if how.layout == "half":
        return columns[: how.rotary_dim // 2], columns[how.rotary_dim // 2 :]
    return columns[0::2], columns[1::2]


def pair_norms(case: Case, values: Float64Array) -> Float64Array:
    """[..., d/2]: lengths of the pairs."""
    first, second = pairs_of(case)
    return np.hypot(values[..., first], values[..., second])


def _out(subject: Subject, case: Case) -> tuple[StoredArray, list[Float64Array]]:
    outputs, name = observe(subject, case), output_name(case)
    return outputs[name], [b[name] for b in full_bounds(subject, case, outputs)]


def _with_turned(case: Case, values: StoredArray) -> Case:
    return case.with_arrays(**{turned_name(case): values})


def _moved(case: Case, positions: StoredArray) -> Case:
    return case.with_arrays(positions=positions.astype(np.int64))


# --- the algebra of rotations ----------------------------------------------------------------------------------------


def identity(subject: Subject, example: Input) -> Judgement:
    """At position 0 nothing turns: the output is x within the bound at angle 0."""
    still = _moved(example.case, np.zeros_like(example.case.arrays["positions"]))
    return certify(subject, still)


def norms_kept(subject: Subject, example: Input) -> Judgement:
    """Every pair keeps its length, times the magnitude, within the length of its two bounds."""
    case = example.case
    out, bounds = _out(subject, case)
    before, after = (pair_norms(case, v.astype(np.float64)) for v in (turned_array(case), out))
    before = before * size_of(case)
    rooms = [pair_norms(case, b) + SLACK * before for b in bounds]
    return kept(subject, np.abs(after - before), rooms, what="lengths of the pairs")


def _exchanged(case: Case, values: StoredArray) -> StoredArray:
    """Both entries of every pair exchanged: a reflection, which turns a rotation by m into one by -m."""
    first, second = pairs_of(case)
    result = values.copy()
    result[..., first], result[..., second] = values[..., second], values[..., first]
    return result


def inverse(subject: Subject, example: Input) -> Judgement:
    """Rotated, reflected, rotated by the same position and reflected back, x is itself: within the two calls' bounds.

    With a magnitude A it is A^2 x. The first call's error passes through an exact rotation, which keeps its length.
    """
    case, grown = example.case, size_of(example.case)
    turned, bounds = _out(subject, case)
    back = _with_turned(case, _exchanged(case, turned))
    if not np.isfinite(turned.astype(np.float64)).all():
        return Judgement(Verdict.EXEMPT, Basis.DERIVED, "the rotated vectors overflow")
    returned, second = _out(subject, back)
    x = turned_array(case).astype(np.float64) * grown**2
    gap = pair_norms(case, _exchanged(case, returned).astype(np.float64) - x)
    size = pair_norms(case, x)
    rooms = [
        grown * pair_norms(case, a) + pair_norms(case, b) + 2 * SLACK * size
        for a, b in zip(bounds, second, strict=True)
    ]
    return kept(subject, gap, rooms, what="rotation and its inverse")


def composition(subject: Subject, example: Input) -> Judgement:
    """R_n R_m = R_(m+n): two rotations equal one by the sum of positions, within the three calls' bounds.

    With a magnitude A they equal A times it.
    """
    case, grown = example.case, size_of(example.case)
    m = case.arrays["positions"]
    n = m // 2 + 1 + draw_of(case).integers(0, 3, m.shape)
    turned, first = _out(subject, case)
    if not np.isfinite(turned.astype(np.float64)).all():
        return Judgement(Verdict.EXEMPT, Basis.DERIVED, "the rotated vectors overflow")
    twice, second = _out(subject, _moved(_with_turned(case, turned), n))
    once, third = _out(subject, _moved(case, m + n))
    gap = pair_norms(case, twice.astype(np.float64) - grown * once.astype(np.float64))
    size = pair_norms(case, turned_array(case).astype(np.float64)) * grown**2
    rooms = [
        grown * (pair_norms(case, a) + pair_norms(case, c)) + pair_norms(case, b) + 2 * SLACK * size
        for a, b, c in zip(first, second, third, strict=True)
    ]
    return kept(subject, gap, rooms, what="two rotations and one by the sum of positions")


def relative_positions(subject: Subject, example: Input) -> Judgement:
    """<R_(m+t) q, R_(n+t) k> = <R_m q, R_n k> = <q, R_(n-m) k>, within the bound that both sides' roundings give.

    With a magnitude A, A^2 times that. The frequencies must not depend on the length.

    Head 0 holds q, head 1 holds k; batch entry 1 the same at positions moved by t. Scores are formed in float64.
    """
    case = example.case
    how, positions = rotation(case), case.arrays["positions"]
    out = observe(subject, case)["out"].astype(np.float64)
    x = case.arrays["x"].astype(np.float64)
    shift = int(positions[1, 0] - positions[0, 0])
    scores = [np.einsum("sd,td->st", *out[b]) for b in (0, 1)]
    slack = SLACK * (how.dim + 2) * np.einsum("sd,td->st", *np.abs(x).max(axis=0)) * 2 * size_of(case) ** 2
    exact = _relative_scores(case, x[0], positions[0])

    def rooms(t: int) -> list[Float64Array]:
        return [
            relative_bound(
                x[0, 0], x[0, 1], positions[0], positions[0], t, form, subject.fmt,
                base=how.base, rotary_dim=how.rotary_dim, layout=how.layout, scaling=how.scaling,
            ) + slack
            for form in subject.forms
        ]  # fmt: skip

    moved = kept(
        subject, np.abs(scores[1] - scores[0]), rooms(shift), what=f"scores after a shift of both positions by {shift}"
    )
    # With no shift the bound counts the same place twice.
    place = [room / 2 + slack for room in rooms(0)]
    return worst_of([moved, kept(subject, np.abs(scores[0] - exact), place, what="scores and q R_(n-m) k")])


def _relative_scores(case: Case, x: Float64Array, positions: NDArray[np.int64]) -> Float64Array:
    """[S, S]: A^2 <q_s, R_(p_t - p_s) k_t> from the oracle's rotations by the differences of positions."""
    length, size = len(positions), size_of(case)
    rows = []
    for s in range(length):
        turned = Case("rope", {"x": x[None, 1:], "positions": positions - positions[s]}, case.options)
        rows.append(size * exact_output(turned)[0, 0] @ x[0, s])
    return np.stack(rows)


def complex_form(subject: Subject, example: Input) -> Judgement:
    """(x_a + i x_b) e^(i m theta), from mpmath at 40 digits: a witness that shares nothing with the oracle."""
    case = example.case
    how = rotation(case)
    out, bounds = _out(subject, case)
    first, second = pairs_of(case)
    x = case.arrays["x"].astype(np.float64)
    context = MPContext()
    context.dps = 40
    places, inverse_of = np.unique(case.arrays["positions"], return_inverse=True)
    thetas = [context.mpf(how.base) ** (context.mpf(-2 * i) / how.rotary_dim) for i in range(how.rotary_dim // 2)]
    units = np.array([[complex(context.expj(int(m) * theta)) for theta in thetas] for m in places])
    turned = (x[..., first] + 1j * x[..., second]) * _per_head(
        units[inverse_of.reshape(case.arrays["positions"].shape)], x
    )
    expected = x.copy()
    expected[..., first], expected[..., second] = turned.real, turned.imag
    slack = np.zeros(x.shape)
    slack[..., first] = slack[..., second] = 2 * SLACK * pair_norms(case, x)
    with np.errstate(invalid="ignore"):
        gap = np.abs(out.astype(np.float64) - expected)
    return kept(subject, gap, [b + slack for b in bounds], what="the complex product")


def _per_head(table: StoredArray, x: Float64Array) -> StoredArray:
    """[S, d/2] or [B, S, d/2] made to broadcast against [B, H, S, d/2]."""
    return table[:, None] if table.ndim == 3 else table


def layouts_agree(subject: Subject, example: Input) -> Judgement:
    """Entries reordered from one layout to the other give the reordered output, within the sum of the bounds."""
    if len(layouts_of(subject)) < 2:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"the only layout is {layouts_of(subject)[0]}")
    half = example.case.with_options(layout="half")
    woven = half.with_options(layout="interleaved")
    at_half, at_woven = (np.concatenate(np.broadcast_arrays(*pairs_of(c))) for c in (half, woven))
    x = turned_array(half)
    moved = x.copy()
    moved[..., at_woven] = x[..., at_half]
    first, bounds = _out(subject, half)
    second, others = _out(subject, _with_turned(woven, moved))
    order = np.arange(x.shape[-1])
    order[at_half] = at_woven
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64)[..., order])
    rooms = [a + b[..., order] for a, b in zip(bounds, others, strict=True)]
    return kept(subject, gap, rooms, what="the two layouts, reordered")


def collisions(subject: Subject, example: Input) -> Judgement:
    """Rows of one vector at different positions differ wherever the exact results do by more than both bounds."""
    case = example.case
    out, bounds = _out(subject, case)
    exact, values = exact_output(case), out.astype(np.float64)
    apart = np.abs(np.diff(exact, axis=2))
    equal = np.diff(values, axis=2) == 0
    positions = case.arrays["positions"]
    stuck, shown = [], []
    for bound in bounds:
        must_show = apart > (bound[:, :, 1:] + bound[:, :, :-1]) * (1 + 2.0**-40)
        shown.append(bool(must_show.any(axis=3).all()))
        stuck.append((must_show & equal).any(axis=3))
    if all(s.any() for s in stuck):
        _, _, row = (int(i) for i in np.argwhere(stuck[0])[0])
        one, two = (int(positions[..., r].reshape(-1)[0]) for r in (row, row + 1))
        detail = f"positions {one} and {two} rotate alike"
        return Judgement(Verdict.FAIL, Basis.DERIVED, detail, worst={"output": "out", "index": [0, 0, row, 0]})
    if not any(shown):
        return Judgement(
            Verdict.VACUOUS, Basis.DERIVED, "the bounds at these positions exceed the difference of the rotations"
        )
    return Judgement(Verdict.PASS, Basis.DERIVED, "different positions give different rotations")


# --- decoding and lengths ---------------------------------------------------------------------------------------------


def decoding(subject: Subject, example: Input) -> Judgement:
    """P10: any run of positions gives what the whole gives: the last one, the second half, and one by one."""
    case = example.case
    length = turned_array(case).shape[2]
    whole = observe(subject, case)
    runs = [(length - 1, length), (length // 2, length), *((i, i + 1) for i in range(min(length, 6)))]
    judged = []
    for start, stop in dict.fromkeys(runs):
        part = _rows(case, start, stop)
        cut = {name: np.ascontiguousarray(values[:, :, start:stop]) for name, values in whole.items()}
        what = f"positions {start} to {stop - 1} of {length} alone"
        judged.append(agree(subject, part, cut, part, observe(subject, part), what=what))
    return worst_of(judged)


def _rows(case: Case, start: int, stop: int) -> Case:
    """These positions of a case as a call of their own."""
    x = np.ascontiguousarray(turned_array(case)[:, :, start:stop])
    at = np.ascontiguousarray(case.arrays["positions"][..., start:stop])
    return _with_turned(case, x).with_arrays(positions=at)


def lengths_leave_no_trace(subject: Subject, example: Input) -> Judgement:
    """A call of another length in between changes nothing: a short, a long and the short one again; and the reverse."""
    case = example.case
    others = [_moved(case, case.arrays["positions"] // 8), _moved(case, case.arrays["positions"] * 8 + 7)]
    judged = []
    for other in others:
        first = observe(subject, case)
        second = certify(subject, other)
        again = observe(subject, case)
        judged += [
            second,
            *(all_bits(first[n], again[n], what="the same call after one of another length") for n in first),
        ]
    return worst_of(judged)


def neutral_scaling(subject: Subject, example: Input) -> Judgement:
    """Parameters that change nothing (factor 1, a length within that of the training) rotate as without scaling."""
    case, plain = example.case, example.case.without_options("scaling")
    first, second = observe(subject, case), observe(subject, plain)
    return agree(subject, case, first, plain, second, what="neutral parameters and none")


def interpolated(subject: Subject, example: Input) -> Judgement:
    """Linear scaling by a whole number is a division of positions: s m turned by theta / s is m turned by theta."""
    plain = example.case.without_options("scaling")
    factor = int(example.case.options["scaling"]["factor"])
    case = _moved(example.case, plain.arrays["positions"] * factor)
    first, second = observe(subject, case), observe(subject, plain)
    return agree(subject, case, first, plain, second, what=f"positions times {factor} under linear scaling, and none")


def with_angle_error(subject: Subject, example: Input) -> Judgement:
    """P1 over positions: within the bound, and how far the output's angles are from the exact ones, in radians."""
    judged = certify(subject, example.case)
    if judged.verdict in (Verdict.ERROR, Verdict.UNSUPPORTED):
        return judged
    worst = angle_error_of(example.case, observe(subject, example.case)[output_name(example.case)])
    return replace(judged, metrics={**judged.metrics, "angle_error": worst})


def angle_error_of(case: Case, output: StoredArray) -> float:
    """The largest angle between a pair of the output and the exact one."""
    first, second = pairs_of(case)
    found, exact = (v[..., first] + 1j * v[..., second] for v in (output.astype(np.float64), exact_output(case)))
    return float(np.abs(np.angle(found * exact.conj())).max(initial=0.0))


# --- other relations -------------------------------------------------------------------------------------------------


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: see `purity`; the other call has other content at other positions, the larger one is both in sequence."""
    case = example.case
    arrays = case.arrays
    name_of_x, x = turned_name(case), turned_array(case)
    reversed_x = np.ascontiguousarray(x[..., ::-1])
    other, joined = {name_of_x: reversed_x}, {name_of_x: np.concatenate([reversed_x, x], axis=2)}
    for name, axis in (("positions", -1), ("cos", 0), ("sin", 0)):
        if name in arrays:
            other[name] = arrays[name] + 7 if name == "positions" else np.ascontiguousarray(arrays[name][::-1])
            joined[name] = np.concatenate([other[name], arrays[name]], axis=axis)
    length = x.shape[2]
    return purity(subject, case, case.with_arrays(**other), case.with_arrays(**joined), lambda out: out[:, :, :length])


def options_matter(subject: Subject, example: Input) -> Judgement:
    """P17. One pair is the same in both layouts."""
    how = rotation(example.case)
    names = ["base", "rotary_dim", "scaling"]
    if how.layout != "half" and how.rotary_dim != 2:
        names.insert(1, "layout")
    return judging.options_matter(subject, example, names=names)


def scalings(subject: Subject, example: Input) -> Judgement:
    """P25: x times a power of two, or negated, gives the output times that power, bit for bit above the subnormals."""
    case = example.case
    fmt, x = subject.fmt, turned_array(example.case).astype(np.float64)
    plain, bounds = _out(subject, case)
    judged = []
    for factor in (-1.0, 8.0, 0.125):
        moved = x * factor
        small = np.abs(moved[moved != 0]).min(initial=np.inf)
        if not np.array_equal(fmt.round(moved), moved) or small < fmt.smallest_normal:
            continue
        other = _with_turned(case, fmt.store(moved))
        scaled, others = _out(subject, other)
        back = scaled.astype(np.float64) / factor
        what = f"x times {factor:g}"
        stored = any("input" in (f.rope.rotate, f.arithmetic.compute) for f in subject.forms)
        if subject.dtype == "fp16" and stored:
            # Products of the rotation itself may be subnormal.
            rooms = [a + b / abs(factor) for a, b in zip(bounds, others, strict=True)]
            judged.append(kept(subject, np.abs(plain.astype(np.float64) - back), rooms, what=what))
        else:
            sizes = [np.abs(v.astype(np.float64)) for v in (plain, scaled)]
            normal = (np.minimum(*sizes) >= fmt.smallest_normal) & np.isfinite(np.maximum(*sizes))
            judged.append(same_bits(plain, back, normal, what=what))
    return _gravest(judged)


def _gravest(judged: Sequence[Judgement]) -> Judgement:
    nothing = Judgement(Verdict.PASS, Basis.EXACT, "no power of two that the format holds")
    return worst_of(judged) if judged else nothing
