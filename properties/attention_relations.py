"""Checks of attention that compare a target with itself, or with facts that need no oracle value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.enclosure import enclose
from oracle.ops.attention_case import blocks, visibility
from properties.bench import Bench, Input
from properties.metamorphic import Outputs, agree, full_bounds, observe, same_bits
from properties.pipeline import certify
from properties.verdict import Basis, Judgement, Verdict, worst_of
from targets.base import run


def visible_rows(case: Case) -> NDArray[np.bool_]:
    """[B, Hq, Sq, Sk]: who may attend to whom."""
    q = case.arrays["q"]
    rows = np.arange(q.shape[2])
    return np.stack([visibility(case, key, rows) for key in blocks(case)]).reshape(*q.shape[:3], -1)


def _with_key(case: Case, j: int, value: float, names: tuple[str, ...] = ("k", "v")) -> Case:
    changed = {}
    for name in names:
        array = case.arrays[name].copy()
        array[:, :, j] = value
        changed[name] = array
    return case.with_arrays(**changed)


def _chosen_key(given: Input, visible: NDArray[np.bool_]) -> int:
    # A key that some rows see and some do not says most; the last one, if there is no such key.
    mixed = np.flatnonzero((~visible).any(axis=(0, 1, 2)))
    return int(mixed[given.features.get("seed", 0) % len(mixed)]) if len(mixed) else visible.shape[-1] - 1


def irrelevant_content(bench: Bench, given: Input) -> Judgement:
    """P2: rows that may not attend to a key keep their bits whatever it holds; a NaN in a used input gives NaN."""
    case = given.case
    visible = visible_rows(case)
    j = _chosen_key(given, visible)
    before = observe(bench, case)
    blind = ~visible[..., j]
    judged = []
    huge = min(bench.fmt.max_finite / 4, 1e30)
    for value, what in ((huge, "a huge value in a key that is not attended"), (-huge, "a huge negative value there")):
        after = observe(bench, _with_key(case, j, value))
        judged.append(same_bits(before["out"], after["out"], blind[..., None], what=what))
    if bench.conventions.get("masked_nan") == "blocked":
        after = observe(bench, _with_key(case, j, float("nan")))
        judged.append(
            same_bits(before["out"], after["out"], blind[..., None], what="NaN in a key that is not attended")
        )
    judged.append(_used_nan(bench, case, visible))
    return worst_of(judged)


def _used_nan(bench: Bench, case: Case, visible: NDArray[np.bool_]) -> Judgement:
    q = case.arrays["q"].copy()
    q[:, :, 0, 0] = np.nan
    rows = visible[:, :, 0].any(axis=-1)
    out = observe(bench, case.with_arrays(q=q))["out"][:, :, 0].astype(np.float64)
    if np.isnan(out[rows]).all():
        return Judgement(Verdict.PASS, Basis.EXACT, "a NaN in a query gives a NaN row")
    return Judgement(Verdict.FAIL, Basis.EXACT, "a NaN in a query row is swallowed: the output row is finite")


def reachability(bench: Bench, given: Input) -> Judgement:
    """P4: perturb key j; rows that may not attend keep their bits, rows that may change where the exact change must show."""
    case = given.case
    visible = visible_rows(case)
    j = _chosen_key(given, visible)
    rng = np.random.default_rng([given.features.get("seed", 0), j])
    changed = {}
    for name in ("k", "v"):
        array = case.arrays[name].copy()
        array[:, :, j] = bench.fmt.store(rng.standard_normal(array[:, :, j].shape) + 1.0)
        changed[name] = array
    other = case.with_arrays(**changed)
    before, after = observe(bench, case), observe(bench, other)
    sees = visible[..., j]
    kept = same_bits(before["out"], after["out"], ~sees[..., None], what=f"rows that may not attend to key {j}")
    if kept.verdict is not Verdict.PASS:
        return kept
    shape = before["out"].shape
    exact = [np.stack([b.part("out").hi for b in enclose(c)]).reshape(shape) for c in (case, other)]
    bounds = [full_bounds(bench, c, {"out": o["out"]})[0]["out"] for c, o in ((case, before), (other, after))]
    must_show = (np.abs(exact[0] - exact[1]) > 2 * (bounds[0] + bounds[1])) & sees[..., None]
    stuck = must_show & (before["out"].astype(np.float64) == after["out"].astype(np.float64))
    if not stuck.any():
        return Judgement(Verdict.PASS, Basis.DERIVED, f"key {j} changes the rows that may attend to it and no others")
    at = [int(i) for i in np.argwhere(stuck)[0]]
    detail = f"row {at[:3]} may attend to key {j} but does not change with it"
    return Judgement(Verdict.FAIL, Basis.DERIVED, detail, worst={"output": "out", "index": at})


def partition_of_unity(bench: Bench, given: Input) -> Judgement:
    """P5: with V = 1 the output is 1 within the bound; with the given V it stays in V's hull, up to the bound."""
    ones = np.ones_like(given.case.arrays["v"])
    unit = certify(bench, given.case.with_arrays(v=ones), outputs=("out",))
    if unit.verdict not in (Verdict.PASS, Verdict.VACUOUS):
        return replace(unit, detail=f"V = 1: {unit.detail}")
    case = given.case
    out = observe(bench, case)
    visible = visible_rows(case)
    v = case.arrays["v"].astype(np.float64)
    v = np.repeat(v, case.arrays["q"].shape[1] // v.shape[1], axis=1)
    seen = visible[..., None]
    low = np.where(seen, v[:, :, None], np.inf).min(axis=3)
    high = np.where(seen, v[:, :, None], -np.inf).max(axis=3)
    room = np.max([b["out"] for b in full_bounds(bench, case, {"out": out["out"]})], axis=0)
    value = out["out"].astype(np.float64)
    live = visible.any(axis=-1)[..., None] & np.isfinite(room)
    outside = live & ~((value >= low - room) & (value <= high + room))
    if outside.any():
        at = [int(i) for i in np.argwhere(outside)[0]]
        return Judgement(
            Verdict.FAIL, Basis.DERIVED, f"output {at} leaves the hull of V", worst={"output": "out", "index": at}
        )
    return unit


def single_key(bench: Bench, given: Input) -> Judgement:
    """P6: one visible key gives its V row, within the bound; bit for bit where P is normalised to exactly 1."""
    return certify(bench, given.case)


def split_merge(bench: Bench, given: Input) -> Judgement:
    """P7: outputs of two key ranges, merged by their LSEs, equal the output of the whole within the bounds."""
    case = given.case
    k, v = case.arrays["k"], case.arrays["v"]
    if k.shape[2] < 2:
        return Judgement(Verdict.PASS, Basis.DERIVED, "a single key cannot be split")
    cut = max(1, k.shape[2] // 3)
    pieces = [case.with_arrays(k=k[:, :, a:b], v=v[:, :, a:b]) for a, b in ((0, cut), (cut, k.shape[2]))]
    whole = observe(bench, case)
    parts = [observe(bench, piece) for piece in pieces]
    if "lse" not in whole or any("lse" not in p for p in parts):
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "no LSE was returned")
    factor = np.log(2.0) if bench.conventions.get("lse_base") == "2" else 1.0
    lse = np.stack([p["lse"].astype(np.float64) * factor for p in parts])
    out = np.stack([p["out"].astype(np.float64) for p in parts])
    ratios = []
    whole_bounds = full_bounds(bench, case, whole)
    part_bounds = [full_bounds(bench, c, p) for c, p in zip(pieces, parts, strict=True)]
    for form in range(len(bench.forms)):
        with np.errstate(all="ignore"):
            top = lse.max(axis=0)
            weights = np.exp(lse - top) / np.exp(lse - top).sum(axis=0)
            merged = (weights[..., None] * out).sum(axis=0)
            merged_lse = top + np.log(np.exp(lse - top).sum(axis=0))
            slip = np.stack([b[form]["lse"] for b in part_bounds]).max(axis=0) + 2.0**-48 * (
                1 + np.abs(lse).max(axis=0)
            )
            moved = np.expm1(2 * slip)[..., None] * (weights[..., None] * np.abs(out - merged)).sum(axis=0)
            room = np.exp(2 * slip)[..., None] * (
                weights[..., None] * np.stack([b[form]["out"] for b in part_bounds])
            ).sum(axis=0)
            room = room + moved + whole_bounds[form]["out"]
            ratio = np.abs(merged - whole["out"].astype(np.float64)) / room
            lse_ratio = np.abs(merged_lse - whole["lse"].astype(np.float64) * factor) / (
                slip + whole_bounds[form]["lse"]
            )
            worst = max(
                float(np.where(np.isinf(room), 0, ratio).max()), float(np.where(np.isinf(slip), 0, lse_ratio).max())
            )
            ratios.append(float("inf") if np.isnan(worst) else worst)
    best = int(np.argmin(ratios))
    forms = {f.label: r for f, r in zip(bench.forms, ratios, strict=True)}
    verdict = Verdict.PASS if ratios[best] <= 1 else Verdict.FAIL
    detail = f"merge of keys [0, {cut}) and [{cut}, {k.shape[2]}): {ratios[best]:.3g} of the allowed difference"
    return Judgement(verdict, Basis.DERIVED, detail, ratios[best], forms=forms)


def grouping(bench: Bench, given: Input) -> Judgement:
    """P13: grouped KV heads give what explicitly repeated ones give."""
    case = given.case
    group = case.arrays["q"].shape[1] // case.arrays["k"].shape[1]
    repeated = case.with_arrays(**{n: np.repeat(case.arrays[n], group, axis=1) for n in ("k", "v")})
    return agree(
        bench, case, observe(bench, case), repeated, observe(bench, repeated), what="grouped and repeated KV heads"
    )


def purity(bench: Bench, given: Input) -> Judgement:
    """P15: inputs and the memory around them unchanged, and the same bits again after a call with other inputs."""
    case = given.case
    first = observe(bench, case)
    around = run(bench.target, case, device=bench.device, seconds=bench.seconds, guarded=True)
    if around.fault is not None:
        return Judgement(Verdict.FAIL, Basis.EXACT, f"{around.fault[0]}: {around.fault[1]}")
    other = {n: bench.fmt.store(a[..., ::-1].astype(np.float64)) for n, a in case.arrays.items()}
    observe(bench, case.with_arrays(**other))
    again = observe(bench, case)
    everywhere = np.ones((1,) * first["out"].ndim, dtype=bool)
    return same_bits(first["out"], again["out"], everywhere, what="a second call with the same inputs")


def _without(case: Case) -> Iterator[tuple[str, Case]]:
    for name in ("scale", "is_causal", "attn_mask"):
        if name in case.options:
            yield name, case.without_options(name)


def options_matter(bench: Bench, given: Input) -> Judgement:
    """P17: the option's effect is larger than the bounds (else the input tests nothing), and the result is within its bound."""
    case = given.case
    judged = certify(bench, case)
    if judged.verdict is not Verdict.PASS:
        return judged
    exact = np.stack([b.part("out").hi for b in enclose(case)])
    for name, bare in _without(case):
        plain = np.stack([b.part("out").hi for b in enclose(bare)])
        bound = full_bounds(bench, case, observe(bench, case))[0]["out"].reshape(exact.shape)
        if not (np.abs(exact - plain) > 2 * bound).any():
            return replace(judged, verdict=Verdict.VACUOUS, detail=f"option {name} has no visible effect on this input")
    return judged


def symmetries(bench: Bench, given: Input) -> Judgement:
    """P25: key order does not matter, duplicated keys change nothing, powers of two pass through exactly."""
    case = given.case
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    plain = observe(bench, case)
    order = np.random.default_rng(given.features.get("seed", 0)).permutation(k.shape[2])
    permuted = case.with_arrays(k=k[:, :, order], v=v[:, :, order])
    judged = [agree(bench, case, plain, permuted, observe(bench, permuted), what="permuted keys")]
    doubled = case.with_arrays(k=np.concatenate([k, k], axis=2), v=np.concatenate([v, v], axis=2))
    twice = {"out": observe(bench, doubled)["out"]}
    judged.append(agree(bench, case, {"out": plain["out"]}, doubled, twice, what="every key twice"))
    fmt = bench.fmt
    larger = case.with_arrays(v=fmt.store(2 * v.astype(np.float64)))
    if np.isfinite(larger.arrays["v"].astype(np.float64)).all():
        halved = observe(bench, larger)["out"].astype(np.float64) / 2
        normal = np.abs(halved) >= fmt.smallest_normal
        judged.append(same_bits(plain["out"], halved, normal, what="V scaled by 2"))
    half, double = q.astype(np.float64) / 2, k.astype(np.float64) * 2
    if np.array_equal(fmt.round(half), half) and np.array_equal(fmt.round(double), double):
        moved = case.with_arrays(q=fmt.store(half), k=fmt.store(double))
        everywhere = np.ones((1,) * plain["out"].ndim, dtype=bool)
        judged.append(same_bits(plain["out"], observe(bench, moved)["out"], everywhere, what="q halved and k doubled"))
    return worst_of(judged)


def exact_arithmetic(bench: Bench, given: Input) -> Judgement:
    """P28: q = 0, integer V: all sums are exact, so only the division and the output rounding may err."""
    case = given.case
    out: Outputs = observe(bench, case)
    v = case.arrays["v"].astype(np.float64)
    mean = np.repeat(v, case.arrays["q"].shape[1] // v.shape[1], axis=1).mean(axis=2)[:, :, None]
    compute = 2.0**-53 if bench.forms[0].compute == "fp64" else 2.0**-24
    room = (4 * compute + bench.fmt.unit_roundoff) * np.abs(mean) + bench.fmt.omega
    if bench.forms[0].normalised_p or len(bench.forms) > 1:
        # A normalised P rounds 1/n (exact for powers of two) after a division that may be a reciprocal.
        room = room + 4 * compute * np.abs(v).mean(axis=2).max()
    gap = np.abs(out["out"].astype(np.float64) - mean)
    ratio = float((gap / room).max())
    verdict = Verdict.PASS if ratio <= 1 else Verdict.FAIL
    return Judgement(verdict, Basis.DERIVED, f"mean of integers: {ratio:.3g} of one division and one rounding", ratio)
