"""P7 and P13 of packed and of paged attention: parts of the keys merged by their LSE, heads alone and repeated.

Both ask of a call of several sequences what attention asks of a dense one. A part of the keys is a call in which each
sequence has some of its own: the first third, at a border of pages where there are such, and the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.formats import StoredArray
from oracle.ops.attention.options import COUNTED_ONCE, RULES, UNPARTED, is_set, taken, with_meanings
from oracle.ops.layouts.case import PAGED, VARLEN, dense, key_count, row_count, sequences
from properties.checks.metamorphic import Outputs, agree, full_bounds, observe
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.ops.attention.merge import merged
from properties.ops.attention.relations import agree_on, visible_rows
from properties.ops.layouts.relations import KEYED, dense_outputs
from properties.subject import Input, Subject

HEADS = 3


def split_merge(subject: Subject, example: Input) -> Judgement:
    """P7: every sequence's output is that of the first third of its keys and of the others, merged."""
    case = example.case
    cuts = np.array([key_count(case, n) // 3 for n in range(sequences(case))])
    if case.op == PAGED:
        size = case.arrays["k_cache"].shape[1]
        cuts = cuts // size * size
    parts = _parts(case, cuts)
    if not parts:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "no call of this target sees a part of these keys alone")
    whole = observe(subject, case)
    if "lse" not in whole:
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, "no LSE was returned")
    seen = [observe(subject, part) for part in parts]
    bounds = full_bounds(subject, case, whole)
    rooms = [full_bounds(subject, part, outputs) for part, outputs in zip(parts, seen, strict=True)]
    judged = []
    for n in range(sequences(case)):
        if row_count(case, (n, 0)):
            judged.append(
                merged(
                    subject,
                    dense_outputs(case, whole, n),
                    [dense_outputs(case, form, n) for form in bounds],  # type: ignore[misc]
                    [dense(part, n) for part in parts],
                    [dense_outputs(case, outputs, n) for outputs in seen],
                    [[dense_outputs(case, form, n) for form in room] for room in rooms],  # type: ignore[misc]
                    int(cuts[n]),
                )
            )
    return worst_of(judged)


def _parts(case: Case, cuts: NDArray[np.int64]) -> list[Case]:
    """Calls in which each sequence has its keys before its cut, and those from it on; none where masks forbid it."""
    if any(is_set(case, name) for name in UNPARTED):
        return []
    found = []
    for first in (True, False):
        part = (_pages if case.op == PAGED else _tokens)(case, cuts, first=first)
        if not first:
            part = part.without_options(*with_meanings(COUNTED_ONCE))
        bare = part.without_options(*with_meanings(RULES))
        fits = [c for c in (part, bare) if _sees_its_share(case, c, cuts, first=first)]
        if not fits:
            return []
        found.append(fits[0])
    return found


def _tokens(case: Case, cuts: NDArray[np.int64], *, first: bool) -> Case:
    sums = case.arrays["cu_seqlens_k"].astype(np.int64)
    starts, stops = (sums[:-1], sums[:-1] + cuts) if first else (sums[:-1] + cuts, sums[1:])
    kept = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    lengths = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32)
    return case.with_arrays(k=case.arrays["k"][kept], v=case.arrays["v"][kept], cu_seqlens_k=lengths)


def _pages(case: Case, cuts: NDArray[np.int64], *, first: bool) -> Case:
    lengths, table = case.arrays["cache_seqlens"], case.arrays["block_table"].copy()
    if first:
        return case.with_arrays(cache_seqlens=cuts.astype(np.int32))
    for n, cut in enumerate(cuts // case.arrays["k_cache"].shape[1]):
        table[n] = np.roll(table[n], -int(cut))
    return case.with_arrays(cache_seqlens=(lengths - cuts).astype(np.int32), block_table=table)


def _sees_its_share(case: Case, part: Case, cuts: NDArray[np.int64], *, first: bool) -> bool:
    """Whether every query sees of the part what it sees of those keys in the whole."""
    for n in range(sequences(case)):
        if row_count(case, (n, 0)) and key_count(part, n):
            seen = visible_rows(dense(case, n))
            share = seen[..., : cuts[n]] if first else seen[..., cuts[n] :]
            if not np.array_equal(visible_rows(dense(part, n)), share):
                return False
    return True


def heads_alone(subject: Subject, example: Input) -> Judgement:
    """P13: a head gives what it gives alone, with its slope and its sink; grouped KV heads are repeated ones."""
    case = example.case
    whole = observe(subject, case)
    keyed, shared = KEYED[case.op], case.arrays[KEYED[case.op][0]].shape[-2]
    heads = case.arrays["q"].shape[1]
    group, judged = heads // shared, []
    if group > 1:
        repeated = case.with_arrays(**{n: np.repeat(case.arrays[n], group, axis=-2) for n in keyed})
        again = observe(subject, repeated)
        judged.append(agree(subject, case, whole, repeated, again, what="grouped and repeated KV heads"))
    for h in np.unique(np.linspace(0, heads - 1, HEADS).astype(int)).tolist():
        single = _one_head(case, h, h // group)
        part = dict(_of_head(case, whole, h))
        judged.append(
            agree_on(subject, single, part, observe(subject, single), what=f"head {h}, among others and alone")
        )
    return worst_of(judged)


def _of_head(case: Case, outputs: Outputs, h: int) -> Iterator[tuple[str, StoredArray]]:
    for name, a in outputs.items():
        yield name, a[h : h + 1] if case.op == VARLEN and name == "lse" else a[:, h : h + 1]


def _one_head(case: Case, h: int, kv: int) -> Case:
    held = {n: np.ascontiguousarray(case.arrays[n][..., kv : kv + 1, :]) for n in KEYED[case.op]}
    arrays = {**case.arrays, "q": np.ascontiguousarray(case.arrays["q"][:, h : h + 1]), **held}
    return replace(case, arrays=arrays, options=taken(case.options, Hq=[h]))
