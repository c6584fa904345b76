"""Checks of multi-head latent attention: visibility, convexity, options, symmetries, both evaluation orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import Float64Array, Format
from oracle.ops.mla.case import visibility
from properties.checks.metamorphic import Outputs, agree, exact_output, full_bounds, observe, same_bits, widest
from properties.judge.judgements import SLACK, draw_of, kept, purity
from properties.judge.pipeline import certify
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.subject import Input, Subject, subject_for
from targets.calling.registry import Unavailable, UnknownTarget, resolve
from targets.calling.target import BadTarget

WEIGHTS = ("w_uk", "w_uv")
KEYS = ("c_kv", "k_pe")


def visible_rows(case: Case) -> NDArray[np.bool_]:
    """[Sq, Sk]: who may attend to whom, the same in every head."""
    return visibility(case, np.arange(case.arrays["q_nope"].shape[2]))


def lse_within_bound(subject: Subject, example: Input) -> Judgement:
    """P8: the log-sum-exp within its bound, in the stated base."""
    return certify(subject, example.case, outputs=("lse",))


def reachability(subject: Subject, example: Input) -> Judgement:
    """P4: other content in key j. Rows that may not attend to it keep their bits, others change where it must show."""
    case = example.case
    visible = visible_rows(case)
    mixed = np.flatnonzero((~visible).any(axis=0))
    rng = draw_of(case)
    j = int(rng.choice(mixed)) if len(mixed) else visible.shape[1] - 1
    changed = {}
    for name in KEYS:
        values = case.arrays[name].copy()
        values[:, j] = subject.fmt.store(rng.standard_normal(values[:, j].shape) + 1.0)
        changed[name] = values
    other = case.with_arrays(**changed)
    before, after = observe(subject, case), observe(subject, other)
    sees = visible[:, j, None]
    hidden = same_bits(before["out"], after["out"], ~sees, what=f"rows that may not attend to key {j}")
    if hidden.verdict is not Verdict.PASS:
        return hidden
    # The widest form: an output may stand still for no other reason than its legal error.
    stuck = (before["out"].astype(np.float64) == after["out"].astype(np.float64)) & sees
    if stuck.any():
        first, second = (widest(subject, c, o) for c, o in ((case, before), (other, after)))
        stuck &= np.abs(exact_output(case) - exact_output(other)) > 2 * (first + second)
    if not stuck.any():
        return Judgement(Verdict.PASS, Basis.DERIVED, f"key {j} changes the rows that may attend to it and no others")
    at = [int(i) for i in np.argwhere(stuck)[0]]
    detail = f"row {at[:3]} may attend to key {j} but does not change with it"
    return Judgement(Verdict.FAIL, Basis.DERIVED, detail, worst={"output": "out", "index": at})


def convexity(subject: Subject, example: Input) -> Judgement:
    """P5: latents and W_UV that make every value 1 give outputs of 1; outputs stay in the hull of v = W_UV c."""
    case = example.case
    c_kv, w_uv = case.arrays["c_kv"].copy(), np.zeros_like(case.arrays["w_uv"])
    c_kv[..., 0] = 1.0
    w_uv[..., 0] = 1.0
    unit = certify(subject, case.with_arrays(c_kv=c_kv, w_uv=w_uv), outputs=("out",))
    if unit.verdict not in (Verdict.PASS, Verdict.VACUOUS):
        return replace(unit, detail=f"values of 1: {unit.detail}")
    c, w = case.arrays["c_kv"].astype(np.float64), case.arrays["w_uv"].astype(np.float64)
    v = np.einsum("bkc,hvc->bhkv", c, w)
    slack = SLACK * (c.shape[-1] + 2) * np.einsum("bkc,hvc->bhkv", np.abs(c), np.abs(w)).max(axis=2)[:, :, None]
    visible = visible_rows(case)[None, None, :, :, None]
    low = np.where(visible, v[:, :, None], np.inf).min(axis=3)
    high = np.where(visible, v[:, :, None], -np.inf).max(axis=3)
    out = observe(subject, case)
    value = out["out"].astype(np.float64)
    live = visible.any(axis=3)
    with np.errstate(invalid="ignore"):
        gap = np.where(live, np.maximum(np.maximum(low - value, value - high), 0.0), 0.0)
        gap = np.where(live & np.isnan(value), np.nan, gap)
    rooms = [b["out"] + slack for b in full_bounds(subject, case, {"out": out["out"]})]
    return worst_of([unit, kept(subject, gap, rooms, what="outputs in the hull of v")])


def pure(subject: Subject, example: Input) -> Judgement:
    """P15: see `purity`; the other call has other queries and latents, the larger one both as a batch."""
    case = example.case
    batched = [n for n in case.arrays if n not in WEIGHTS]
    other = case.with_arrays(**{n: np.ascontiguousarray(case.arrays[n][..., ::-1]) for n in batched})
    both = case.with_arrays(**{n: np.concatenate([other.arrays[n], case.arrays[n]]) for n in batched})
    return purity(subject, case, other, both, lambda values: values[: len(values) // 2])


def _scaled(case: Case, fmt: Format, powers: dict[str, int]) -> Case | None:
    """The case with each named array times a power of two; None if the format does not hold the products exactly."""
    changed = {}
    for name, power in powers.items():
        values = case.arrays[name].astype(np.float64)
        moved = np.ldexp(values, power)
        if not np.array_equal(fmt.round(moved), moved) or not _normal(moved, fmt) or not _normal(values, fmt):
            return None
        changed[name] = fmt.store(moved)
    return case.with_arrays(**changed)


def _normal(values: Float64Array, fmt: Format) -> bool:
    size = np.abs(values)
    return bool(np.isfinite(size).all() and ((size == 0) | (size >= fmt.smallest_normal)).all())


def _powers_agree(
    subject: Subject, case: Case, first: Outputs, powers: dict[str, int], factor: float, what: str
) -> Judgement | None:
    """Bit-equality after a scaling by powers of two.

    In fp16 with stored intermediates, which may be subnormal, agreement within the bounds. None: not exactly scaled.
    """
    other = _scaled(case, subject.fmt, powers)
    if other is None:
        return None
    second = observe(subject, other)
    wide = second["out"].astype(np.float64) / factor
    narrow = subject.dtype == "fp16" and any("input" in (f.latent.up, f.latent.summed) for f in subject.forms)
    if narrow:
        bounds = zip(full_bounds(subject, case, first), full_bounds(subject, other, second), strict=True)
        rooms = [a["out"] + b["out"] / factor for a, b in bounds]
        return kept(subject, np.abs(first["out"].astype(np.float64) - wide), rooms, what=what)
    shown = (np.abs(wide) >= subject.fmt.smallest_normal) & (np.abs(wide) * factor >= subject.fmt.smallest_normal)
    return same_bits(first["out"], wide, shown, what=what)


def symmetries(subject: Subject, example: Input) -> Judgement:
    """P25: key order does not matter, duplicated keys change nothing, powers of two pass through exactly."""
    case = example.case
    plain = observe(subject, case)
    order = draw_of(case).permutation(case.arrays["c_kv"].shape[1])
    permuted = case.with_arrays(**{n: case.arrays[n][:, order] for n in KEYS})
    judged = [agree(subject, case, plain, permuted, observe(subject, permuted), what="permuted keys")]
    doubled = case.with_arrays(**{n: np.concatenate([case.arrays[n]] * 2, axis=1) for n in KEYS})
    twice = {"out": observe(subject, doubled)["out"]}
    judged.append(agree(subject, case, {"out": plain["out"]}, doubled, twice, what="every key twice"))
    for powers, factor, what in (
        ({"w_uv": 1}, 2.0, "W_UV scaled by 2"),
        ({"q_nope": -1, "q_pe": -1, "w_uk": 1, "k_pe": 1}, 1.0, "queries halved, W_UK and k_pe doubled"),
    ):
        found = _powers_agree(subject, case, plain, powers, factor, what)
        judged += [found] if found is not None else []
    return worst_of(judged)


def counterpart(subject: Subject) -> Subject:
    """The subject of the other evaluation order: the target's ``counterpart``, else the built-in one of that order.

    ValueError where there is none for this dtype.
    """
    forms = {form.latent.form for form in subject.forms}
    spec = subject.target.counterpart or ("mla_materialised" if forms == {"absorbed"} else "mla_absorbed")
    try:
        target = resolve(spec, op="mla")
    except (UnknownTarget, BadTarget, Unavailable) as error:
        raise ValueError(str(error)) from error
    if subject.dtype not in target.dtypes:
        raise ValueError(f"the other evaluation order, {spec}, has no {subject.dtype}")
    return subject_for(target, subject.dtype, device=subject.device, profile=subject.profile)


def forms_agree(subject: Subject, example: Input) -> Judgement:
    """P26: both evaluation orders give the same within the sum of their bounds.

    A power of two moved from W_UK and W_UV into c changes no bit.
    """
    case = example.case
    first = observe(subject, case)
    judged = []
    moved = _powers_agree(
        subject, case, first, {"c_kv": 2, "w_uk": -2, "w_uv": -2}, 1.0, "c scaled by 4, W_UK and W_UV by 1/4"
    )
    judged += [moved] if moved is not None else []
    try:
        other = counterpart(subject)
    except ValueError as error:
        return worst_of([*judged, Judgement(Verdict.UNSUPPORTED, Basis.EXACT, str(error))])
    alignment = other.conventions.get("causal_alignment")
    if case.options.get("is_causal") and alignment not in (None, case.options.get("causal_alignment")):
        case = case.without_options("is_causal", "causal_alignment")
        first = observe(subject, case)
    second = observe(other, case)
    ours, theirs = full_bounds(subject, case, first), full_bounds(other, case, second)
    for name in first:
        if name not in second:
            continue
        values = [o[name].astype(np.float64) / s.nat(name) for o, s in ((first, subject), (second, other))]
        with np.errstate(invalid="ignore"):
            gap = np.where(values[0] == values[1], 0.0, np.abs(values[0] - values[1]))
        rooms = [a[name] + b[name] + SLACK * np.abs(values[0]) for a in ours for b in theirs]
        judged.append(
            kept(subject, gap, rooms, what=f"{name} of {subject.target.name} and {other.target.name}", output=name)
        )
    return worst_of(judged)


def exact_arithmetic(subject: Subject, example: Input) -> Judgement:
    """P28: zero queries and small integers: every sum is exact in every order; only division and output round.

    What may be off before that meets the size of the terms and not of their sum: 1/n, if it is a rounded reciprocal,
    and the weights of a merge of splits, which go through two logarithms (2 (7 u ln n + 6.1 u), an exponential, a
    division and 10 additions).
    """
    case = example.case
    out = observe(subject, case)["out"]
    c, w = case.arrays["c_kv"].astype(np.float64), case.arrays["w_uv"].astype(np.float64)
    mean = np.einsum("bkc,hvc->bhkv", c, w).mean(axis=2)[:, :, None]
    sizes = np.einsum("bkc,hvc->bhkv", np.abs(c), np.abs(w)).mean(axis=2)[:, :, None]
    rooms = []
    for form in subject.forms:
        u = 2.0**-53 if form.arithmetic.compute == "fp64" else 2.0**-24
        inner = 5 * u if form.sums.splits == 1 else (14 * float(np.log(c.shape[1])) + 32) * u
        room = (4 * u + subject.fmt.unit_roundoff) * np.abs(mean) + subject.fmt.omega + inner * sizes
        rooms.append(np.broadcast_to(room, out.shape))
    gap = np.abs(out.astype(np.float64) - mean)
    return kept(subject, gap, rooms, what="mean of integers, one division and one rounding")
