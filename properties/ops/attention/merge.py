"""P7: the outputs of disjoint sets of keys, merged by their LSE, equal the output of all keys.

Split-KV kernels, ring attention and chunked prefill rely on it. Where a row sees nothing of a part, the part's weight
is zero: by its own LSE if the target's convention for it is -inf, else because the caller knows. A sink is counted by
one part: given to the first, and withheld from the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import Float64Array
from oracle.ops.attention.options import COUNTED_ONCE, RULES, UNPARTED, chosen, is_set, with_meanings
from properties.checks.metamorphic import Outputs, full_bounds, observe
from properties.judge.judgements import draw_of
from properties.judge.remembered import judged
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.ops.attention.relations import visible_rows
from properties.subject import Input, Subject

Bounds = list[dict[str, Float64Array]]


def split_merge(subject: Subject, example: Input) -> Judgement:
    """Two parts of the keys at a third of them and at a drawn place, masks and causality cut along with them."""
    case = example.case
    keys = case.arrays["k"].shape[2]
    if keys < 2:
        return Judgement(Verdict.PASS, Basis.DERIVED, "a single key cannot be split")
    cuts = dict.fromkeys([max(1, keys // 3), int(draw_of(case).integers(1, keys))])
    split = [(cut, parts) for cut in cuts if (parts := list(_parts(subject, case, cut)))]
    if not split:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "no call of this target sees a part of these keys alone")
    whole = observe(subject, case)
    if "lse" not in whole:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "no LSE was returned")
    return worst_of([_merged(subject, case, whole, parts, cut) for cut, parts in split])


def _merged(subject: Subject, case: Case, whole: Outputs, parts: Sequence[Case], cut: int) -> Judgement:
    seen = [observe(subject, part) for part in parts]

    def make() -> Judgement:
        bounds, *rooms = (full_bounds(subject, c, s) for c, s in zip((case, *parts), (whole, *seen), strict=True))
        return merged(subject, whole, bounds, parts, seen, rooms, cut)

    return judged("merge", subject, list(zip((case, *parts), (whole, *seen), strict=True)), make, words=[str(cut)])


def _parts(subject: Subject, case: Case, cut: int) -> Iterator[Case]:
    """Calls that attend to keys [0, cut) and [cut, Sk) of the case; nothing where one of them cannot be asked for."""
    if any(is_set(case, name) for name in UNPARTED):
        return
    k, v = case.arrays["k"], case.arrays["v"]
    keys, mask = k.shape[2], case.options.get("attn_mask")
    found = []
    for start, stop in ((0, cut), (cut, keys)):
        part = case.with_arrays(k=k[:, :, start:stop], v=v[:, :, start:stop])
        if mask is not None and mask.shape[-1] > 1:
            part = part.with_options(attn_mask=mask[..., start:stop])
        if start:
            part = part.without_options(*with_meanings(COUNTED_ONCE))
        if any(case.options.get(name) for name in RULES):
            seen = visible_rows(case)[..., start:stop]
            bare = part.without_options(*with_meanings(RULES))
            if np.array_equal(visible_rows(part), seen):
                pass
            elif np.array_equal(visible_rows(bare), seen):
                part = bare
            elif mask is None and subject.has("attn_mask"):
                part = bare.with_options(attn_mask=np.ascontiguousarray(seen[:1, :1]))
            else:
                return
        found.append(part)
    yield from found


def merged(
    subject: Subject,
    whole: Outputs,
    whole_bounds: Bounds,
    parts: Sequence[Case],
    seen: Sequence[Outputs],
    bounds: Sequence[Bounds],
    cut: int,
) -> Judgement:
    """What ``parts`` (dense cases, the first of them with the sink) gave, merged, against the output of all keys."""
    blind = np.stack([~visible_rows(part).any(axis=-1) for part in parts])
    factor = 1 / subject.nat()
    lse = np.stack([s["lse"].astype(np.float64) * factor for s in seen])
    out = np.stack([s["out"].astype(np.float64) for s in seen])
    if subject.conventions.get("empty_row_lse") != "-inf":
        lse = np.where(blind, -np.inf, lse)
    out = np.where(blind[..., None] & ~np.isfinite(out), 0.0, out)
    sink, excluded = _sink(parts[0]), chosen(parts[0], "lse_sink") == "excluded"
    if parts[0].options.get("sinks") is not None:
        # With nothing but the sink to see, its logit is the sum.
        lse[0] = np.where(blind[0], -np.inf if excluded else sink, lse[0])
    total, whole_lse = whole["out"].astype(np.float64), whole["lse"].astype(np.float64) * factor
    if excluded:
        # What a part weighs includes its sink.
        lse[0], whole_lse = np.logaddexp(lse[0], sink), np.logaddexp(whole_lse, sink)
    ratios = []
    for form in range(len(subject.forms)):
        # A part of which a row sees nothing is exactly empty: no bound of it enters.
        lse_rooms = np.where(blind, 0.0, np.stack([b[form]["lse"] for b in bounds]))
        out_rooms = np.where(blind[..., None], 0.0, np.stack([b[form]["out"] for b in bounds]))
        with np.errstate(all="ignore"):
            top = lse.max(axis=0)
            shares = np.exp(lse - top)
            weights = (shares / shares.sum(axis=0))[..., None]
            joined = (weights * out).sum(axis=0)
            merged_lse = top + np.log(shares.sum(axis=0))
            size = np.where(np.isfinite(lse), np.abs(lse), 0.0).max(axis=0)
            slip = lse_rooms.max(axis=0) + 2.0**-48 * (1 + size)
            # Beyond e^600 any difference is allowed; the cap keeps inf * 0 out.
            tilt = np.minimum(2 * slip, 600.0)[..., None]
            moved = np.expm1(tilt) * (weights * np.abs(out - joined)).sum(axis=0)
            room = np.exp(tilt) * (weights * out_rooms).sum(axis=0) + moved + whole_bounds[form]["out"]
            lse_room = slip + whole_bounds[form]["lse"]
        promised = np.isfinite(whole_bounds[form]["lse"]) & np.isfinite(lse_rooms).all(axis=0)
        promised_out = promised[..., None] & np.isfinite(whole_bounds[form]["out"]) & np.isfinite(out_rooms).all(axis=0)
        out_ratio = _worst(np.abs(joined - total), room, promised_out)
        ratios.append(max(out_ratio, _worst(np.abs(merged_lse - whole_lse), lse_room, promised)))
    best = int(np.argmin(ratios))
    forms = {f.label: r for f, r in zip(subject.forms, ratios, strict=True)}
    verdict = Verdict.PASS if ratios[best] <= 1 else Verdict.FAIL
    detail = f"merge of the keys before and from {cut}: {ratios[best]:.3g} of the allowed difference"
    return Judgement(verdict, Basis.DERIVED, detail, ratios[best], forms=forms)


def _sink(case: Case) -> Float64Array:
    """The sinks [1, Hq, 1] of a case, -inf without any."""
    sinks = case.options.get("sinks")
    heads = case.arrays["q"].shape[1]
    held = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    return np.asarray(held[None, :, None])


def _worst(gap: Float64Array, room: Float64Array, promised: NDArray[np.bool_]) -> float:
    """The largest gap / room of what is ``promised``; inf for a gap that is nan."""
    with np.errstate(all="ignore"):
        ratio = np.where(promised, np.where(gap == 0, 0.0, gap / room), 0.0)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))
