"""Checks of attention that compare a target with itself, or with facts that need no oracle value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from oracle.bounds.forward import EXPONENT_ROUNDINGS, LSE_ROUNDINGS
from oracle.case import Case
from oracle.contract.constants import constants
from oracle.contract.contract import Contract
from oracle.formats import Float64Array, Format, format_of
from oracle.ops.attention.case import blocks, visibility
from oracle.ops.attention.options import COUNTED_ONCE, is_set, taken
from oracle.ops.attention.row import NAN_BEHIND
from properties.checks.metamorphic import (
    Outputs,
    agree,
    differing,
    exact_output,
    full_bounds,
    observe,
    same_bits,
    widest,
)
from properties.judge import judgements as judging
from properties.judge.judgements import draw_of
from properties.judge.pipeline import certify
from properties.judge.remembered import judged
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.subject import Input, Subject


def visible_rows(case: Case) -> NDArray[np.bool_]:
    """[B, Hq, Sq, Sk]: who may attend to whom."""
    q = case.arrays["q"]
    rows = np.arange(q.shape[2])
    return np.stack([visibility(case, key, rows) for key in blocks(case)]).reshape(*q.shape[:3], -1)


def _with_key(case: Case, j: int, **values: object) -> Case:
    changed = {}
    for name, value in values.items():
        array = case.arrays[name].copy()
        array[:, :, j] = value
        changed[name] = array
    return case.with_arrays(**changed)


def watched_keys(case: Case, visible: NDArray[np.bool_], count: int) -> list[int]:
    """Up to ``count`` keys that some rows see and some do not: the last, the first, then any; else the last key.

    With a window first those on both sides of either end of a drawn row's.
    """
    ends = _ends_of_a_window(case, visible) if case.options.get("window_size") is not None else []
    mixed = np.flatnonzero((~visible).any(axis=(0, 1, 2)))
    if not len(mixed):
        return ends[:count] or [visible.shape[-1] - 1]
    others = draw_of(case).permutation(mixed)
    return [int(j) for j in dict.fromkeys([*ends, mixed[-1], mixed[0], *others])][: max(count, len(ends))]


def _ends_of_a_window(case: Case, visible: NDArray[np.bool_]) -> list[int]:
    row = visible[0, 0, draw_of(case).integers(visible.shape[2])]
    ends = np.flatnonzero(row[1:] != row[:-1])
    return [int(j) for end in ends[[0, -1]] for j in (end, end + 1)] if len(ends) else []


def _unseen_bits(before: Outputs, after: Outputs, blind: NDArray[np.bool_], *, what: str) -> Judgement:
    """Rows that are ``blind`` [B, Hq, Sq] keep the bits of every output."""
    found = [same_bits(before["out"], after["out"], blind[..., None], what=what)]
    if "lse" in before and "lse" in after:
        lse = same_bits(before["lse"], after["lse"], blind, what=f"{what} (LSE)")
        found.append(replace(lse, worst={**lse.worst, "output": "lse"} if lse.worst else {}))
    return worst_of(found)


def blocks_nan(subject: Subject, case: Case) -> bool:
    """Whether the target's conventions keep a NaN from rows that may not attend to it, whatever excludes it here."""
    kinds = [name for name, excludes in NAN_BEHIND.items() if excludes(case.options)]
    return bool(kinds) and all(subject.conventions.get(name) == "blocked" for name in kinds)


def irrelevant_content(subject: Subject, example: Input) -> Judgement:
    """P2: rows that may not attend to a key keep their bits whatever it holds; a NaN in a used input gives NaN."""
    case = example.case
    visible = visible_rows(case)
    before = observe(subject, case)
    huge = min(subject.fmt.max_finite / 4, 1e30)
    contents = {"a huge value": huge, "a huge negative value": -huge}
    if blocks_nan(subject, case):
        contents["NaN"] = float("nan")
    found = []
    for j in watched_keys(case, visible, 2):
        for what, value in contents.items():
            after = observe(subject, _with_key(case, j, k=value, v=value))
            found.append(_unseen_bits(before, after, ~visible[..., j], what=f"{what} in a key that is not attended"))
    found.append(_used_nan(subject, case, visible))
    return worst_of(found)


def _used_nan(subject: Subject, case: Case, visible: NDArray[np.bool_]) -> Judgement:
    q = case.arrays["q"].copy()
    q[:, :, 0, 0] = np.nan
    rows = visible[:, :, 0].any(axis=-1)
    out = observe(subject, case.with_arrays(q=q))["out"][:, :, 0].astype(np.float64)
    if np.isnan(out[rows]).all():
        return Judgement(Verdict.PASS, Basis.EXACT, "a NaN in a query gives a NaN row")
    return Judgement(Verdict.FAIL, Basis.EXACT, "a NaN in a query row is swallowed: the output row is finite")


def reachability(subject: Subject, example: Input) -> Judgement:
    """P4: perturb keys one by one; rows that may not attend keep their bits, rows that may change where that must show.

    Rows that see a key have a finite value, whatever they do not see.
    """
    case = example.case
    visible = visible_rows(case)
    before = observe(subject, case)
    spoiled = visible.any(axis=-1, keepdims=True) & ~np.isfinite(before["out"].astype(np.float64))
    spoiled &= np.isfinite(widest(subject, case, before, spoiled))
    if spoiled.any():
        at = [int(i) for i in np.argwhere(spoiled)[0]]
        detail = f"row {at[:3]} sees keys, and its output is not finite"
        return Judgement(Verdict.FAIL, Basis.EXACT, detail, worst={"output": "out", "index": at})
    rng = draw_of(case)
    keys = watched_keys(case, visible, 3)
    for j in keys:
        content = {n: subject.fmt.store(rng.standard_normal(case.arrays[n][:, :, j].shape) + 1.0) for n in ("k", "v")}
        other = _with_key(case, j, **content)
        after = observe(subject, other)
        sees = visible[..., j]
        unseen = _unseen_bits(before, after, ~sees, what=f"rows that may not attend to key {j}")
        if unseen.verdict is not Verdict.PASS:
            return unseen
        stuck = (before["out"].astype(np.float64) == after["out"].astype(np.float64)) & sees[..., None]
        if stuck.any():
            seen = [(case, before), (other, after)]
            unmoved = judged("unmoved", subject, seen, partial(_unmoved, subject, seen, stuck, j), words=[str(j)])
            if unmoved.verdict is not Verdict.PASS:
                return unmoved
    detail = f"keys {', '.join(map(str, keys))} each change the rows that may attend to them and no others"
    return Judgement(Verdict.PASS, Basis.DERIVED, detail)


def _unmoved(subject: Subject, seen: Sequence[tuple[Case, Outputs]], stuck: NDArray[np.bool_], key: int) -> Judgement:
    """FAIL where an element that ``stuck`` to its value as a key changed should have moved by more than its bounds."""
    before, after = (exact_output(case) for case, _ in seen)
    room = sum(widest(subject, case, outputs, stuck) for case, outputs in seen)
    stuck = stuck & (np.abs(before - after) > 2 * room)
    if not stuck.any():
        return Judgement(Verdict.PASS, Basis.DERIVED)
    at = [int(i) for i in np.argwhere(stuck)[0]]
    detail = f"row {at[:3]} may attend to key {key} but does not change with it"
    return Judgement(Verdict.FAIL, Basis.DERIVED, detail, worst={"output": "out", "index": at})


def partition_of_unity(subject: Subject, example: Input) -> Judgement:
    """P5: with V = 1 the output is 1 within the bound; with the given V it stays in V's hull, up to the bound."""
    ones = np.ones_like(example.case.arrays["v"])
    unit = certify(subject, example.case.with_arrays(v=ones), outputs=("out",))
    if unit.verdict not in (Verdict.PASS, Verdict.VACUOUS):
        return replace(unit, detail=f"V = 1: {unit.detail}")
    case = example.case
    out = observe(subject, case)
    visible = visible_rows(case)
    v = case.arrays["v"].astype(np.float64)
    if is_set(case, "v_descale"):
        v = v * np.asarray(case.options["v_descale"], dtype=np.float64)[..., None, None]
    v = np.repeat(v, case.arrays["q"].shape[1] // v.shape[1], axis=1)
    seen = visible[..., None]
    # A sink is one more key, of value 0.
    nothing = (0.0, 0.0) if any(is_set(case, name) for name in COUNTED_ONCE) else (np.inf, -np.inf)
    low = np.where(seen, v[:, :, None], np.inf).min(axis=3, initial=nothing[0])
    high = np.where(seen, v[:, :, None], -np.inf).max(axis=3, initial=nothing[1])
    value = out["out"].astype(np.float64)
    outside = visible.any(axis=-1, keepdims=True) & ~((value >= low) & (value <= high))
    if not outside.any():
        return unit

    def inside() -> Judgement:
        room = widest(subject, case, out, outside)
        beyond = outside & np.isfinite(room) & ~((value >= low - room) & (value <= high + room))
        at = [int(i) for i in np.argwhere(beyond)[0]] if beyond.any() else []
        return Judgement(
            Verdict.FAIL if at else Verdict.PASS,
            Basis.DERIVED,
            f"output {at} leaves the hull of V",
            worst={"output": "out", "index": at},
        )

    hull = judged("hull of V", subject, [(case, out)], inside)
    return unit if hull.verdict is Verdict.PASS else hull


def agree_on(subject: Subject, case: Case, first: Outputs, second: Outputs, *, what: str) -> Judgement:
    """PASS if two outputs for the same case differ by at most twice their bound."""

    def within() -> Judgement:
        bounds = full_bounds(subject, case, first, where=differing(first, second))
        found = []
        for name in first:
            gap = np.abs(first[name].astype(np.float64) - second[name].astype(np.float64))
            found.append(judging.kept(subject, gap, [2 * b[name] for b in bounds], what=what, output=name))
        return worst_of(found)

    return judged("agree on", subject, [(case, first), (case, second)], within, words=[what])


def purity(subject: Subject, example: Input) -> Judgement:
    """P15."""
    case = example.case
    reversed_ = {n: np.ascontiguousarray(a[..., ::-1]) for n, a in case.arrays.items()}
    other = case.with_arrays(**reversed_)
    return judging.purity(subject, case, other, _two_sequences(other, case), lambda values: values[: len(values) // 2])


def _two_sequences(first: Case, second: Case) -> Case:
    """Both cases, alike in shape and options, as one with twice the sequences."""
    arrays = {n: np.concatenate([a, second.arrays[n]]) for n, a in first.arrays.items()}
    twice = [*range(len(first.arrays["q"]))] * 2
    return replace(first, arrays=arrays, options=taken(first.options, B=twice))


SHIFTS = (-10, -3, -1, 1, 3, 10)


def symmetries(subject: Subject, example: Input) -> Judgement:
    """P25: key order does not matter, duplicated keys change nothing, powers of two pass through exactly.

    Of options those that do not know where a key stands; a sink, which is not duplicated along, weighs less beside two.
    """
    case = example.case
    k, v = case.arrays["k"], case.arrays["v"]
    plain = observe(subject, case)
    order = draw_of(case).permutation(k.shape[2])
    permuted = case.with_arrays(k=k[:, :, order], v=v[:, :, order])
    found = [agree(subject, case, plain, permuted, observe(subject, permuted), what="permuted keys")]
    if not any(is_set(case, name) for name in COUNTED_ONCE):
        doubled = case.with_arrays(k=np.concatenate([k, k], axis=2), v=np.concatenate([v, v], axis=2))
        twice = {"out": observe(subject, doubled)["out"]}
        found.append(agree(subject, case, {"out": plain["out"]}, doubled, twice, what="every key twice"))
    fmt = subject.fmt
    larger = case.with_arrays(v=fmt.store(2 * v.astype(np.float64)))
    if np.isfinite(larger.arrays["v"].astype(np.float64)).all():
        halved = observe(subject, larger)["out"].astype(np.float64) / 2
        normal = np.abs(halved) >= fmt.smallest_normal
        found.append(same_bits(plain["out"], halved, normal, what="V scaled by 2"))
    nowhere = np.zeros(plain["out"].shape[:3], dtype=bool)
    for shift in SHIFTS:
        moved = _scaled_oppositely(case, shift, fmt)
        if moved is not None:
            what = f"q scaled by 2^{shift} and k by 2^{-shift}"
            found.append(_unseen_bits(plain, observe(subject, moved), ~nowhere, what=what))
    return worst_of(found)


def _scaled_oppositely(case: Case, shift: int, fmt: Format) -> Case | None:
    """q 2^shift and k 2^-shift, or None where a factor, scaled or not, leaves the format's normal range."""
    scaled = {"q": np.ldexp(case.arrays["q"].astype(np.float64), shift)}
    scaled["k"] = np.ldexp(case.arrays["k"].astype(np.float64), -shift)
    scale = case.options.get("scale") or 1.0 / float(np.sqrt(case.arrays["q"].shape[-1]))
    for values in scaled.values():
        size = np.abs(values[values != 0])
        small, large = float(size.min(initial=np.inf)), float(size.max(initial=0.0))
        # A kernel may store the scaled operand.
        if small * min(1.0, scale) < fmt.smallest_normal or large * max(1.0, scale) > fmt.max_finite:
            return None
    return case.with_arrays(**{n: fmt.store(a) for n, a in scaled.items()})


def exact_arithmetic(subject: Subject, example: Input) -> Judgement:
    """P28: q = 0, integer V, 2^i keys: sums are exact; divisions, merges of parts and the output rounding may err."""
    case = example.case
    out: Outputs = observe(subject, case)
    v = case.arrays["v"].astype(np.float64)
    v = np.repeat(v, case.arrays["q"].shape[1] // v.shape[1], axis=1)
    mean = v.mean(axis=2, keepdims=True)
    spread = np.abs(v - mean).mean(axis=2, keepdims=True)
    size = np.abs(v).mean(axis=2, keepdims=True)
    rooms = [_exact_room(form, case, mean, spread, size) for form in subject.forms]
    gap = np.abs(out["out"].astype(np.float64) - mean)
    return judging.kept(subject, gap, [np.broadcast_to(r, gap.shape) for r in rooms], what="mean of integers")


def _exact_room(
    form: Contract, case: Case, mean: Float64Array, spread: Float64Array, size: Float64Array
) -> Float64Array:
    c = constants(form, format_of(case.arrays["q"]))
    room = (c.u_div + c.u_o) * (1 + c.u_div) * np.abs(mean) + c.omega_o
    if form.weights.normalised:
        # 1/n is a power of two: only its division errs, in each weight by itself.
        room = room + c.u_div * size
    if form.sums.splits > 1:
        # Parts of unequal length are merged by e^L with L = ln n of a part (`oracle.bounds.forward.weight_error`).
        keys = np.log(case.arrays["k"].shape[2])
        rounded = (LSE_ROUNDINGS + 2 * EXPONENT_ROUNDINGS) * c.u * keys * 1.001
        rho = rounded + c.e_log * keys + c.e_ln - np.log1p(-c.e_exp)
        own = c.u_div + (form.sums.splits + 3) * c.u
        room = room + np.expm1(2 * rho) * spread + own * (1 + np.expm1(2 * rho)) * size
    return np.asarray(room)
