"""Counterfactuals of packed and of paged attention: whose keys a sequence reads, and attention's own in each sequence.

A sequence is a dense case of attention (`oracle.ops.layouts.case.dense`), so the table of attention applies to
each, and one of its defects is claimed if every sequence has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oracle.block import Block, Rows
from oracle.case import Case
from oracle.ops.attention.options import TABLE
from oracle.ops.layouts import case as layouts
from oracle.ops.table import op_named
from properties.diagnosis.counterfactual import (
    Change,
    Counterfactual,
    FailingCase,
    Hypothesis,
    JudgedBlock,
    Key,
    Predictions,
    Source,
    Table,
    changed,
    of_case,
)
from properties.diagnosis.heads import TILES
from properties.ops.attention import diagnosis as attention
from properties.ops.attention import diagnosis_options as diagnose_options
from properties.ops.layouts.relations import KEYED, dense_outputs, key_places
from properties.subject import Subject

# Kinds of defects that a sequence without keys can show.
OF_EMPTY = ("empty rows", "zeros", "sign")
Span = Callable[[int], tuple[int, int]]


def possible(says: str, case: Case) -> Iterator[Counterfactual]:
    """The target computed another case, if that is one."""
    try:
        op_named(case.op).blocks(case)
    except ValueError:
        return
    yield of_case(says, case)


# --- packed ---


def spans(failing: FailingCase) -> Iterator[Counterfactual]:
    """Sequences of a packed call that read the keys of other places."""
    sums = failing.case.arrays["cu_seqlens_k"].astype(int)
    queries = failing.case.arrays["cu_seqlens_q"].astype(int)
    count, total = len(sums) - 1, int(sums[-1])

    def own(n: int) -> tuple[int, int]:
        return int(sums[n]), int(sums[n + 1])

    def at(n: int, step: int) -> tuple[int, int]:
        """The span of a neighbour of sequence ``n``; of ``n`` itself, where there is none."""
        return own(n + step) if 0 <= n + step < count else own(n)

    def from_own_start(n: int, length: int) -> tuple[int, int]:
        return own(n)[0], own(n)[0] + length

    rows: list[tuple[str, str, Span]] = [
        ("the prefix sums of the queries were used for the keys", "", lambda n: (int(queries[n]), int(queries[n + 1]))),
        ("each sequence had the length of the one before it", "", lambda n: from_own_start(n, _length(at(n, -1)))),
        ("each sequence had the length of the next", "", lambda n: from_own_start(n, _length(at(n, 1)))),
        ("each sequence read the keys of the next", "", lambda n: at(n, 1)),
        ("each sequence read the keys of the one before it", "", lambda n: at(n, -1)),
        ("every sequence read the keys of the first", "", lambda n: own(0)),
        ("every sequence read all keys of the call", "", lambda n: (0, total)),
        ("each sequence read all keys up to its own end", "", lambda n: (0, own(n)[1])),
        ("each sequence also read the first key of the next", "", lambda n: from_own_start(n, _length(own(n)) + 1)),
        ("each sequence also read the last key of the one before it", "", lambda n: (own(n)[0] - 1, own(n)[1])),
        ("each sequence also read all keys of the next", "", lambda n: (own(n)[0], at(n, 1)[1])),
    ]
    for t in (4, 8, *TILES):
        says = "each sequence read its neighbour's keys up to a whole tile of {} keys"
        rows.append((says, str(t), lambda n, t=t: from_own_start(n, -(-_length(own(n)) // t) * t)))  # type: ignore[misc]
    for says, choice, span in rows:
        yield Counterfactual(says, _from(failing.case, span), choice=choice)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _from(case: Case, span: Span) -> Source:
    """Sequence n with the keys span(n) of the call, as far as there are such."""
    total = len(case.arrays["k"])

    def source(key: Key, rows: Rows) -> tuple[Case, Key, Rows]:
        start, stop = (min(max(place, 0), total) for place in span(key[0]))
        moved = case.arrays["cu_seqlens_k"].copy()
        # Only this sequence is looked at; its place in k is all that matters of the prefix sums.
        moved[key[0] : key[0] + 2] = start, max(start, stop)
        return layouts.dense(case.with_arrays(cu_seqlens_k=moved), key[0]), (0, key[1]), rows

    return source


# --- paged ---


def lengths(failing: FailingCase) -> Iterator[Counterfactual]:
    case = failing.case
    held, size = case.arrays["cache_seqlens"], case.arrays["k_cache"].shape[1]
    pages = -(-held // size)

    def of(says: str, other: NDArray[np.int64]) -> Iterator[Counterfactual]:
        return possible(says, case.with_arrays(cache_seqlens=np.asarray(other, dtype=np.int32)))

    yield from of("the last page were never read unless it is full", np.where(held > size, held // size * size, held))
    yield from of("the last page were never read", np.maximum(pages - 1, 0) * size)
    yield from of("the places behind the last key of a page were attended to", pages * size)
    yield from of("each sequence had the length of the one before it", np.concatenate([held[:1], held[:-1]]))
    yield from of("each sequence had the length of the next", np.concatenate([held[1:], held[-1:]]))
    yield from of("every sequence had the length of the longest", np.full_like(held, held.max(initial=0)))
    yield from of("every sequence were one key longer", held + 1)
    yield from of("every sequence were one key shorter", np.maximum(held - 1, 0))


def pages(failing: FailingCase) -> Iterator[Counterfactual]:
    """The table's entries read in another order, or not at all."""
    case = failing.case
    table, (total, size) = case.arrays["block_table"], case.arrays["k_cache"].shape[:2]
    used = [len(layouts.pages_of(case, n)) for n in range(len(table))]

    def of(
        says: str, pick: Callable[[NDArray[np.int64], int], NDArray[np.int64]], *, full_only: bool = False
    ) -> Iterator[Counterfactual]:
        other = np.clip(table.astype(np.int64), 0, total - 1)
        for n, count in enumerate(used):
            if not full_only or layouts.key_count(case, n) % size == 0:
                other[n, :count] = pick(other[n], count)[:count]
        lost = [n for n, count in enumerate(used) if (other[n, :count] >= total).any()]
        made = possible(says, case.with_arrays(block_table=np.minimum(other, total - 1).astype(np.int32)))
        return (replace(c, change=_unknown(lost)) for c in made)

    last = table.shape[1] - 1
    yield from of("pages were taken to follow the first one in memory", lambda row, c: row[0] + np.arange(c))

    def behind(row: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return np.append(row[: max(count - 1, 0)], row[min(count, last)])

    yield from of("the entry behind the last page were read for it", behind)
    yield from of("the entry behind the last page were read for it where that is full", behind, full_only=True)
    yield from of("each page were that of the entry behind it", lambda row, c: row[np.minimum(np.arange(c) + 1, last)])
    yield from of("each page were that of the entry before it", lambda row, c: row[np.maximum(np.arange(c) - 1, 0)])
    yield from of("pages were read in reverse order", lambda row, c: row[:c][::-1])
    yield from of("every page were the first one", lambda row, c: np.repeat(row[:1], c))
    yield from of("page numbers were off by one", lambda row, c: row[:c] + 1)
    whole = np.broadcast_to(table[:1], table.shape)
    if len(table) > 1:
        says = "every sequence used the pages of the first"
        yield from possible(says, case.with_arrays(block_table=np.ascontiguousarray(whole)))


def _unknown(lost: list[int]) -> Change:
    """Sequences whose pages lie outside the cache may give anything."""

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        return {n: q.marked("free", True) for n, q in p.items()} if block.key[0] in lost else p

    return change


def padding(failing: FailingCase) -> Iterator[Counterfactual]:
    """What NaN behind the last key of a page does to the rows of its sequence."""
    count = layouts.sequences(failing.case)
    for says, cache, reached in (("V", "v_cache", ("out",)), ("K and V", "k_cache", ("out", "lse"))):
        tainted = [_tainted(failing.case, n, cache) for n in range(count)]
        if any(tainted):

            def change(
                s: FailingCase,
                block: Block,
                p: Predictions,
                tainted: list[bool] = tainted,
                reached: Sequence[str] = reached,
            ) -> Predictions:
                bad = tainted[block.key[0]]
                return {n: q.marked("breaks", bad) if n in reached else q for n, q in p.items()}

            yield changed(f"0 were multiplied by the NaN behind the last key of a page, in {says}", change)


def _tainted(case: Case, n: int, name: str) -> bool:
    """Whether something that is no number stands behind the last key of sequence ``n``, on its page."""
    count, cache = layouts.key_count(case, n), case.arrays[name]
    page, used = divmod(count, cache.shape[1])
    behind = cache[case.arrays["block_table"][n, page], used:] if used else np.zeros(1)
    return not bool(np.isfinite(behind.astype(np.float64)).all())


def spoiled(subject: Subject, case: Case) -> Case | None:
    """NaN wherever no sequence has a key."""
    where = np.any([key_places(case, n) for n in range(layouts.sequences(case))], axis=0)
    arrays = {name: case.arrays[name].copy() for name in KEYED[case.op]}
    for array in arrays.values():
        array[~where] = np.nan
    return None if where.all() else case.with_arrays(**arrays)


# --- both ---


def slopes(failing: FailingCase) -> Iterator[Counterfactual]:
    """What each sequence has for itself, of the wrong one."""
    yield from diagnose_options.misread(failing.case, [row.name for row in TABLE if "B" in row.dims])


def of_attention(hypothesis: Hypothesis) -> Hypothesis:
    """A kind of defect of attention, in every sequence that can show it; the others are as they should be."""

    def imagine(failing: FailingCase) -> Iterable[Counterfactual]:
        found: dict[tuple[str, str], dict[int, Counterfactual]] = {}
        dense = {n: _dense_case(failing, n) for n in sorted({judged.block.key[0] for judged in failing.blocks})}
        for n, inner in dense.items():
            if not layouts.key_count(failing.case, n) and hypothesis.name not in OF_EMPTY:
                # Its dense case has a key, and a mask that hides it: neither is the target's.
                continue
            for c in hypothesis.imagine(inner):
                if not c.fitted and c.elsewhere is None:
                    found.setdefault((c.says, c.choice), {})[n] = c
        return (_together(failing, dense, by_sequence) for by_sequence in found.values())

    return replace(hypothesis, imagine=imagine)


def _dense_case(failing: FailingCase, n: int) -> FailingCase:
    """Sequence ``n`` as a failing case of attention; its subject is not called."""
    inner = replace(failing.subject, target=replace(failing.subject.target, op="attention"))
    blocks = tuple(_dense_judged(judged) for judged in failing.blocks if judged.block.key[0] == n)
    place = failing.blocks[failing.worst[0]].block.key
    at = [judged.block.key[1] for judged in blocks].index(place[1]) if place[0] == n else 0
    case, outputs = layouts.dense(failing.case, n), dense_outputs(failing.case, failing.outputs, n)
    return FailingCase(inner, case, outputs, blocks, (at, failing.worst[1] if place[0] == n else 0))


def _dense_judged(judged: JudgedBlock) -> JudgedBlock:
    return replace(judged, block=_dense_block(judged.block))


def _dense_block(block: Block) -> Block:
    return replace(block, key=(0, block.key[1]), places={})


def _together(
    failing: FailingCase, dense: dict[int, FailingCase], by_sequence: dict[int, Counterfactual]
) -> Counterfactual:
    first = next(iter(by_sequence.values()))

    def source(key: Key, rows: Rows) -> tuple[Case, Key, Rows]:
        c = by_sequence.get(key[0])
        if c is None or c.source is None:
            return dense[key[0]].case, (0, key[1]), rows
        return c.source((0, key[1]), rows)

    def change(s: FailingCase, block: Block, p: Predictions) -> Predictions:
        c = by_sequence.get(block.key[0])
        if c is None or c.change is None:
            return p
        return c.change(dense[block.key[0]], _dense_block(block), p)

    return replace(first, source=source, change=change)


_OWN = (Hypothesis("slopes", slopes),)
# What a row or a head of one sequence gives in another's place is no such defect; nor are numbers read off one output.
_OF_ATTENTION = tuple(
    of_attention(h) for h in attention.HYPOTHESES if h.name not in ("layout", "row sums", "fitted scale")
)

TABLES = {
    layouts.VARLEN: Table((Hypothesis("keys of others", spans), *_OWN, *_OF_ATTENTION)),
    layouts.PAGED: Table(
        (
            Hypothesis("lengths", lengths),
            Hypothesis("pages", pages),
            Hypothesis("padding", padding),
            *_OWN,
            *_OF_ATTENTION,
        ),
        (("with NaN wherever no sequence has a key: ", spoiled),),
    ),
}
