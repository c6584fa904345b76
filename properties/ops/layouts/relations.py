"""Checks of packed and of paged attention: what a sequence must not notice of the others, of pages and of padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import StoredArray
from oracle.ops.attention.options import taken
from oracle.ops.layouts.case import PAGED, VARLEN, key_count, pages_of, query_range, sequences
from properties.checks.invariance import equal_bits, invariant
from properties.checks.metamorphic import Outputs, agree, full_bounds, observe
from properties.judge import judgements as judging
from properties.judge.judgements import draw_of
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.subject import Input, Subject

KEYED = {VARLEN: ("k", "v"), PAGED: ("k_cache", "v_cache")}


def contents(subject: Subject) -> dict[str, float]:
    """What stands where nobody may look."""
    huge = min(subject.fmt.max_finite / 4, 1e30)
    return {"NaN": float("nan"), "infinity": float("inf"), "a huge value": huge, "a huge negative value": -huge}


def of_sequence(case: Case, outputs: Outputs, n: int) -> dict[str, StoredArray]:
    """The outputs of sequence ``n`` alone, in the layout of a call with one sequence."""
    if case.op == PAGED:
        return {name: a[n : n + 1] for name, a in outputs.items()}
    rows = query_range(case, n)
    return {name: a[rows] if name == "out" else a[:, rows] for name, a in outputs.items()}


def dense_outputs(case: Case, outputs: Outputs, n: int) -> dict[str, StoredArray]:
    """The outputs of sequence ``n`` as attention gives those of its dense case: O [1, Hq, Sq, Dv], L [1, Hq, Sq]."""
    own = of_sequence(case, outputs, n)
    if case.op == PAGED:
        return own
    return {name: a.transpose(1, 0, 2)[None] if name == "out" else a[None] for name, a in own.items()}


def alone(case: Case, n: int) -> Case:
    """Sequence ``n`` as the only one of its call."""
    if case.op == PAGED:
        own = {name: case.arrays[name][n : n + 1] for name in ("q", "block_table", "cache_seqlens")}
    else:
        rows, (start, stop) = query_range(case, n), case.arrays["cu_seqlens_k"][n : n + 2]
        own = {
            "q": case.arrays["q"][rows],
            "k": case.arrays["k"][start:stop],
            "v": case.arrays["v"][start:stop],
            "cu_seqlens_q": np.array([0, rows.stop - rows.start], dtype=np.int32),
            "cu_seqlens_k": np.array([0, stop - start], dtype=np.int32),
        }
    return replace(case, arrays={**case.arrays, **own}, options=taken(case.options, B=[n]))


def key_places(case: Case, n: int) -> NDArray[np.bool_]:
    """Where the keys of sequence ``n`` stand: a mask over tokens [total_k], or over (page, place)."""
    if case.op == VARLEN:
        start, stop = case.arrays["cu_seqlens_k"][n : n + 2]
        places = np.zeros(len(case.arrays["k"]), dtype=bool)
        places[start:stop] = True
        return places
    pages, size = case.arrays["k_cache"].shape[:2]
    places, count = np.zeros((pages, size), dtype=bool), key_count(case, n)
    for index, page in enumerate(pages_of(case, n)):
        places[page, : min(size, count - index * size)] = True
    return places


def _poisoned(case: Case, where: NDArray[np.bool_], value: float) -> Case:
    changed = {}
    for name in KEYED[case.op]:
        array = case.arrays[name].copy()
        array[where] = value
        changed[name] = array
    return case.with_arrays(**changed)


def irrelevant_content(subject: Subject, example: Input) -> Judgement:
    """P2: nothing but a sequence's own keys reaches its rows: neighbours, unused pages, the rest of a last page, and
    the table's entries behind its end may hold anything. A NaN in a query reaches its row."""
    case = example.case
    before = observe(subject, case)
    judged = []
    for what, value in contents(subject).items():
        for n in _few(case):
            after = observe(subject, _poisoned(case, ~key_places(case, n), value))
            own, seen = of_sequence(case, before, n), of_sequence(case, after, n)
            judged.append(equal_bits(own, seen, what=f"{what} in what is not sequence {n}'s"))
    if case.op == PAGED:
        judged.append(
            equal_bits(before, observe(subject, _other_entries(case)), what="table entries that are not used")
        )
    judged.append(_used_nan(subject, case))
    return worst_of(judged)


def _few(case: Case) -> list[int]:
    """Sequences that have a query: the first, the last, and one between them."""
    held = [n for n in range(sequences(case)) if case.op == PAGED or key_rows(case, n)]
    return sorted({held[0], held[len(held) // 2], held[-1]})


def key_rows(case: Case, n: int) -> int:
    """How many queries sequence ``n`` of a packed call has."""
    rows = query_range(case, n)
    return int(rows.stop - rows.start)


def _other_entries(case: Case) -> Case:
    table = case.arrays["block_table"].copy()
    for n in range(len(table)):
        used = len(pages_of(case, n))
        table[n, used:] = (table[n, used:] + 1) % len(case.arrays["k_cache"])
    return case.with_arrays(block_table=table)


def _used_nan(subject: Subject, case: Case) -> Judgement:
    n = next((n for n in _few(case) if key_count(case, n)), None)
    if n is None:
        return Judgement(Verdict.PASS, Basis.EXACT, "no sequence has a key")
    q = case.arrays["q"].copy()
    last = q[n, 0] if case.op == PAGED else q[query_range(case, n)].transpose(1, 0, 2)[0]
    # The last query sees a key, whatever the alignment: there are no more queries than keys, or no causal rule.
    last[-1, 0] = np.nan
    spoiled = case.with_arrays(q=q)
    visible = _sees_a_key(spoiled, n)
    out = of_sequence(case, observe(subject, spoiled), n)["out"].astype(np.float64)
    row = out[0, 0, -1] if case.op == PAGED else out[-1, 0]
    if not visible or np.isnan(row).all():
        return Judgement(Verdict.PASS, Basis.EXACT, "a NaN in a query gives a NaN row")
    return Judgement(Verdict.FAIL, Basis.EXACT, "a NaN in a query row is swallowed: the output row is finite")


def _sees_a_key(case: Case, n: int) -> bool:
    block = next(b for b in enclose(case) if b.key == (n, 0))
    return not bool(block.empty[-1])


def neighbours(subject: Subject, example: Input) -> Judgement:
    """P11: a sequence gives the same alone and among others."""
    case = example.case
    whole = observe(subject, case)
    return worst_of([_alone_and_among(subject, case, whole, n) for n in _few(case)])


def _alone_and_among(subject: Subject, case: Case, whole: Outputs, n: int) -> Judgement:
    single = alone(case, n)
    own, bare = of_sequence(case, whole, n), observe(subject, single)
    what = f"sequence {n} alone and among {sequences(case)}"
    return invariant(subject, own, bare, lambda: agree(subject, single, own, single, bare, what=what), what=what)


def permuted_pages(subject: Subject, example: Input) -> Judgement:
    """P12: where pages lie does not matter: relabelled, and in a larger cache, they give the same bits."""
    case = example.case
    before = observe(subject, case)
    judged = [
        equal_bits(before, observe(subject, moved), what=what)
        for what, moved in (("permuted pages", _relabelled(case, 0)), ("pages of a larger cache", _relabelled(case, 3)))
    ]
    return worst_of(judged)


def _relabelled(case: Case, more: int) -> Case:
    """The same keys on other pages, of ``more`` pages in all."""
    pages = len(case.arrays["k_cache"])
    order = draw_of(case).permutation(pages + more)[:pages]
    moved = {}
    for name in KEYED[PAGED]:
        cache = case.arrays[name]
        placed = np.full((pages + more, *cache.shape[1:]), np.nan).astype(cache.dtype)
        placed[order] = cache
        moved[name] = placed
    return case.with_arrays(**moved, block_table=order[case.arrays["block_table"]].astype(np.int32))


def decode(subject: Subject, example: Input) -> Judgement:
    """P10: the queries of a causal call one by one, with a cache that grows by one key each, as all at once."""
    case = example.case
    whole = observe(subject, case)
    bounds = full_bounds(subject, case, whole)
    total = case.arrays["q"].shape[2]
    judged = []
    for row in range(total):
        lengths = np.maximum(case.arrays["cache_seqlens"] - (total - 1 - row), 0).astype(np.int32)
        step = case.with_arrays(q=case.arrays["q"][:, :, row : row + 1], cache_seqlens=lengths)
        seen = observe(subject, step)
        own = full_bounds(subject, step, seen)
        for name in whole:
            here = whole[name][:, :, row : row + 1].astype(np.float64)
            # Rows without a key have no bound; their difference is that of the convention, which P3 is about.
            with np.errstate(invalid="ignore"):
                gap = np.abs(here - seen[name].astype(np.float64))
            rooms = [b[name][:, :, row : row + 1] + o[name] for b, o in zip(bounds, own, strict=True)]
            what = f"query {row} with the keys up to it, and all at once"
            judged.append(judging.kept(subject, gap, rooms, what=what, output=name))
    return worst_of(judged)


def purity(subject: Subject, example: Input) -> Judgement:
    """P15."""
    case = example.case
    numbers = ("q", *KEYED[case.op])
    other = case.with_arrays(**{n: np.ascontiguousarray(case.arrays[n][..., ::-1]) for n in numbers})
    tokens = len(case.arrays["q"])

    def first(values: StoredArray) -> StoredArray:
        # The LSE of a packed call has its tokens last.
        return values[:, :tokens] if case.op == VARLEN and values.ndim == 2 else values[:tokens]

    return judging.purity(subject, case, other, _joined(other, case), first)


def _joined(first: Case, second: Case) -> Case:
    """The sequences of both, alike in shape and options, in one call."""
    arrays = {}
    for name, a in first.arrays.items():
        b = second.arrays[name]
        if name.startswith("cu_seqlens"):
            arrays[name] = np.concatenate([a, a[-1] + b[1:]])
        elif name == "block_table":
            arrays[name] = np.concatenate([a, (b + len(first.arrays["k_cache"])).astype(b.dtype)])
        else:
            arrays[name] = np.concatenate([a, b])
    return replace(first, arrays=arrays, options=taken(first.options, B=[*range(sequences(first))] * 2))
