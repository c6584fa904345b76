"""Attention whose sequences lie otherwise in memory: packed one behind the other, or with keys in pages.

attention_varlen (FlashAttention): q [total_q, Hq, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]; sequence n has the
rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] and the keys between cu_seqlens_k, int32 [N + 1] each. O [total_q, Hq, Dv],
L [Hq, total_q].

attention_paged (vLLM, arXiv 2309.06180): k_cache [pages, page_size, Hkv, D], v_cache [pages, page_size, Hkv, Dv]; key j
of sequence b is row j % page_size of page block_table[b, j // page_size], int32 [B, max_blocks], for
j < cache_seqlens[b], int32 [B]. q [B, Hq, Sq, D] holds the last Sq positions of each sequence: its alignment is
bottom_right. O [B, Hq, Sq, Dv], L [B, Hq, Sq].

Both are layouts, not ops of their own: every sequence is evaluated as the dense case that it is, with that case's
enclosures and bounds. Options are those of attention that do not lack it; a row of an array is a sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.arithmetic.base import Arithmetic, V
from oracle.block import Block, Key, Rows
from oracle.case import Case
from oracle.contract import presets
from oracle.contract.contract import Contract
from oracle.formats import Float64Array, StoredArray
from oracle.ops.attention import case as attention_case
from oracle.ops.attention.limits import limits_of
from oracle.ops.attention.options import ROWS, Sizes, check_options, defaults, taken
from oracle.ops.attention.row import CONVENTIONS, mean_of_values, scale_of
from oracle.ops.op import REFUSAL, Array, Op, Tiny

NAMES = VARLEN, PAGED = "attention_varlen", "attention_paged"
OPTIONS = defaults(lacking="layouts")
LIMITS = limits_of(OPTIONS)


def sequences(case: Case) -> int:
    """How many sequences the case holds."""
    return len(case.arrays["cu_seqlens_q"]) - 1 if case.op == VARLEN else int(case.arrays["q"].shape[0])


def query_range(case: Case, n: int) -> slice:
    """Rows of sequence ``n`` in a packed q."""
    return slice(*(int(place) for place in case.arrays["cu_seqlens_q"][n : n + 2]))


def key_count(case: Case, n: int) -> int:
    """How many keys sequence ``n`` has."""
    if case.op == PAGED:
        return int(case.arrays["cache_seqlens"][n])
    start, stop = case.arrays["cu_seqlens_k"][n : n + 2]
    return int(stop - start)


def pages_of(case: Case, n: int) -> NDArray[np.int64]:
    """The pages of sequence ``n`` that hold keys, in order."""
    used = -(-key_count(case, n) // case.arrays["k_cache"].shape[1])
    return np.asarray(case.arrays["block_table"][n, :used].astype(np.int64))


def dense(case: Case, n: int) -> Case:
    """Sequence ``n`` as a case of attention with one sequence.

    Without keys it has one that nobody may attend to: its rows are empty.
    """
    if case.op == VARLEN:
        start, stop = (int(place) for place in case.arrays["cu_seqlens_k"][n : n + 2])
        packed = {"q": case.arrays["q"][query_range(case, n)]}
        packed |= {name: case.arrays[name][start:stop] for name in ("k", "v")}
        arrays = {name: a.transpose(1, 0, 2)[None] for name, a in packed.items()}
        options = taken(case.options, B=[n])
    else:
        pages, count = pages_of(case, n), key_count(case, n)
        arrays = {"q": case.arrays["q"][n : n + 1]}
        for name, cache in (("k", "k_cache"), ("v", "v_cache")):
            held = case.arrays[cache][pages].reshape(-1, *case.arrays[cache].shape[2:])[:count]
            arrays[name] = held.transpose(1, 0, 2)[None]
        options = {**taken(case.options, B=[n]), "causal_alignment": "bottom_right"}
    if not arrays["k"].shape[2]:
        for name in ("k", "v"):
            _, heads, _, width = arrays[name].shape
            arrays[name] = np.zeros((1, heads, 1, width), dtype=arrays[name].dtype)
        options["attn_mask"] = np.zeros((1, 1), dtype=bool)
    return Case("attention", arrays, options)


def check(case: Case) -> None:
    """ValueError, naming the argument and its value, unless shapes, indices and options fit together."""
    if case.op == VARLEN:
        _check_varlen(case)
    else:
        _check_paged(case)
    lacking = [name for name in case.options if name in ROWS and name not in OPTIONS]
    if lacking:
        raise ValueError(f"{case.op} takes no {lacking[0]}")
    check_options(case.options, OPTIONS, Sizes({"B": sequences(case), "Hq": _query_heads(case)}))


def _check_varlen(case: Case) -> None:
    q, k, v = (case.arrays[n] for n in ("q", "k", "v"))
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != 3:
            raise ValueError(f"{name} must be [total, H, D], got shape {list(a.shape)}")
    _check_heads(q.shape[1:], k.shape[1:], v.shape[1:], names=("q", "k", "v"))
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v differ in their number of tokens: {k.shape[0]} and {v.shape[0]}")
    counts = {}
    for name, total in (("cu_seqlens_q", len(q)), ("cu_seqlens_k", len(k))):
        sums = _integers(case, name, 1)
        if not len(sums) or sums[0] != 0:
            raise ValueError(f"{name} must start at 0, got {sums.tolist()}")
        if (np.diff(sums) < 0).any():
            raise ValueError(f"{name} must not descend, got {sums.tolist()}")
        if sums[-1] != total:
            raise ValueError(f"{name} must end at the {total} tokens there are, got {sums.tolist()}")
        counts[name] = len(sums) - 1
    if counts["cu_seqlens_q"] != counts["cu_seqlens_k"]:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k hold {' and '.join(map(str, counts.values()))} sequences")


def _check_paged(case: Case) -> None:
    q, k, v = (case.arrays[n] for n in ("q", "k_cache", "v_cache"))
    for name, a, meant in (("q", q, "[B, H, S, D]"), ("k_cache", k, _CACHE), ("v_cache", v, _CACHE)):
        if a.ndim != 4:
            raise ValueError(f"{name} must be {meant}, got shape {list(a.shape)}")
    _check_heads(q.shape[1::2], k.shape[2:], v.shape[2:], names=("q", "k_cache", "v_cache"))
    if k.shape[:2] != v.shape[:2] or not k.shape[1]:
        raise ValueError(f"k_cache and v_cache hold pages {list(k.shape[:2])} and {list(v.shape[:2])}")
    table, lengths = _integers(case, "block_table", 2), _integers(case, "cache_seqlens", 1)
    for name, a in (("block_table", table), ("cache_seqlens", lengths)):
        if len(a) != len(q):
            raise ValueError(f"{name} holds {len(a)} sequences, q {len(q)}")
    room = table.shape[1] * k.shape[1]
    if len(lengths) and (lengths.min() < 0 or lengths.max() > room):
        raise ValueError(f"cache_seqlens must lie between 0 and the table's {room} positions, got {lengths.tolist()}")
    for n in range(len(q)):
        used = pages_of(case, n)
        if len(used) and (used.min() < 0 or used.max() >= len(k)):
            raise ValueError(f"block_table of sequence {n} names a page that is none of {len(k)}: {used.tolist()}")
    if case.options.get("causal_alignment", "bottom_right") != "bottom_right":
        raise ValueError(f"causal_alignment {case.options['causal_alignment']!r}: q holds the last positions")


_CACHE = "[pages, page_size, H, D]"


def _check_heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *, names: tuple[str, ...]) -> None:
    """Heads and widths (H, D) of the three."""
    if q[1] != k[1]:
        raise ValueError(f"{names[0]} and {names[1]} differ in head dimension: {q[1]} and {k[1]}")
    if k[0] != v[0]:
        raise ValueError(f"{names[1]} and {names[2]} differ in heads: {k[0]} and {v[0]}")
    if k[0] == 0 or q[0] % k[0]:
        raise ValueError(f"{q[0]} query heads are no multiple of {k[0]} KV heads")


def _integers(case: Case, name: str, dims: int) -> StoredArray:
    a = case.arrays[name]
    if a.ndim != dims or not np.issubdtype(a.dtype, np.integer):
        raise ValueError(f"{name} must be {dims}-dimensional of integers, got {a.dtype} {list(a.shape)}")
    return a


def _query_heads(case: Case) -> int:
    return int(case.arrays["q"].shape[1])


def blocks(case: Case) -> list[tuple[int, ...]]:
    """(sequence, query head), of sequences that have a query."""
    check(case)
    return [(n, h) for n in range(sequences(case)) if row_count(case, (n, 0)) for h in range(_query_heads(case))]


def row_count(case: Case, key: tuple[int, ...] = ()) -> int:
    if case.op == PAGED:
        return int(case.arrays["q"].shape[2])
    if not key:
        return len(case.arrays["q"])
    rows = query_range(case, key[0])
    return int(rows.stop - rows.start)


def together(case: Case, key: tuple[int, ...]) -> Hashable:
    """The heads of one sequence."""
    return key[0], attention_case.together(case, key)


def in_dense(key: Key) -> tuple[int, Key]:
    """The sequence of a head, or of a stack, and its key in the `dense` case."""
    n, h = key
    return int(np.ravel(n)[0]), (0 * n, h)


def evaluate(ar: Arithmetic[V], case: Case, key: Key, rows: Rows) -> Block:
    n, own_key = in_dense(key)
    h = key[1]
    block = replace(attention_case.evaluate(ar, dense(case, n), own_key, rows), key=key)
    if case.op == PAGED:
        return block
    own = query_range(case, n)
    return replace(block, places={"out": (own, h), "lse": (h, own)})


def model(case: Case, key: Key, rows: Rows, contract: Contract) -> dict[str, Float64Array]:
    n, own_key = in_dense(key)
    return attention_case.model(dense(case, n), own_key, rows, contract)


def output_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    q = case.arrays["q"].shape
    if case.op == PAGED:
        return {"out": (*q[:3], case.arrays["v_cache"].shape[3]), "lse": q[:3]}
    return {"out": (q[0], q[1], case.arrays["v"].shape[2]), "lse": (q[1], q[0])}


def _op(name: str, arrays: Mapping[str, Array], *, results: Mapping[str, str], **more: Any) -> Op:
    return Op(
        name=name,
        family="attention",
        presets=presets.ATTENTION,
        arrays=arrays,
        results=results,
        limits=LIMITS,
        usual={"scale": scale_of("q")},
        trivial=lambda case, block: mean_of_values(dense(case, block.key[0]), replace(block, key=(0, block.key[1]))),
        blocks=blocks,
        row_count=row_count,
        evaluate=evaluate,
        together=together,
        output_shapes=output_shapes,
        model=model,
        modelled=attention_case.modelled,
        width=lambda case, key: max(1, key_count(case, key[0])),
        **more,
    )


def _longest(name: str) -> Callable[[Case], int]:
    """The longest of a packed case's sequences, which a function may ask for beside their prefix sums."""
    return lambda case: int(np.diff(case.arrays[name]).max(initial=0))


def _integers_of(**values: object) -> dict[str, NDArray[np.int32]]:
    return {name: np.array(value, dtype=np.int32) for name, value in values.items()}


OPS = (
    _op(
        VARLEN,
        {
            "q": Array("total_q Hq D"),
            "k": Array("total_k Hkv D"),
            "v": Array("total_k Hkv Dv"),
            "cu_seqlens_q": Array("N+1", "index"),
            "cu_seqlens_k": Array("N+1", "index"),
        },
        results={"out": "total_q Hq Dv", "lse": "Hq total_q"},
        options=OPTIONS,
        conventions={**CONVENTIONS, **dict.fromkeys(LIMITS, REFUSAL)},
        extras={"max_seqlen_q": _longest("cu_seqlens_q"), "max_seqlen_k": _longest("cu_seqlens_k")},
        tiny=Tiny(
            given=lambda size: _integers_of(cu_seqlens_q=[0, size["total_q"]], cu_seqlens_k=[0, size["total_k"]])
        ),
    ),
    _op(
        PAGED,
        {
            "q": Array("B Hq Sq D"),
            "k_cache": Array("pages page_size Hkv D"),
            "v_cache": Array("pages page_size Hkv Dv"),
            "block_table": Array("B max_blocks", "index"),
            "cache_seqlens": Array("B", "index"),
        },
        results={"out": "B Hq Sq Dv", "lse": "B Hq Sq"},
        options={**OPTIONS, "causal_alignment": "bottom_right"},
        conventions={**CONVENTIONS, **dict.fromkeys(LIMITS, REFUSAL), "causal_alignment": ("bottom_right",)},
        # The second of two pages is used.
        tiny=Tiny(
            counts={"pages": 2, "page_size": 16, "max_blocks": 1},
            given=lambda size: _integers_of(block_table=[[1]], cache_seqlens=[size["Sk"]]),
        ),
    ),
)
