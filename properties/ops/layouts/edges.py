"""The deterministic inputs of packed and of paged attention, one list per property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from oracle.ops.attention.options import COUNTED_ONCE, ROWS
from oracle.ops.layouts.case import PAGED
from properties.inputs.recipes import Logits, Recipe
from properties.ops.attention.options import NAMES, alone, held, together
from properties.ops.layouts.inputs import Lengths, layout_input
from properties.subject import Input, Subject


def _pairs(subject: Subject, *pairs: tuple[int, int], sq: int = 1) -> Lengths:
    """The lengths as they are, for pages with ``sq`` queries in each sequence."""
    return [(sq, keys) for _, keys in pairs] if subject.op == PAGED else list(pairs)


def _made(subject: Subject, edge: str, pairs: Lengths, **more: Any) -> Input:
    return layout_input(subject, pairs, features={"edge": edge}, **more)


def accuracy(subject: Subject) -> Iterator[Input]:
    """P1: prefill, decode, and both in one call; a long sequence among short ones."""
    longest = 200 if subject.target.interpreted else min(1500, subject.profile.large)
    yield _made(subject, "prefill", _pairs(subject, (9, 9), (33, 33), (4, 4), sq=4), is_causal=True, kv_heads=2)
    yield _made(subject, "decode", _pairs(subject, (1, 40), (1, 7), (1, 65)), is_causal=True, kv_heads=2)
    yield _made(subject, "mixed", _pairs(subject, (1, 40), (17, 33), (5, 9), sq=5), is_causal=True, dims=64)
    yield _made(subject, "one long", _pairs(subject, (1, 3), (2, longest), (1, 1), sq=2), dims=64)


def hidden(subject: Subject) -> Iterator[Input]:
    """P2, P11: neighbours on both sides, keys that end inside a page and at its border, sequences without keys."""
    # Only pages have a size; where each call is interpreted, one size is enough.
    sizes = (16, 4) if subject.op == "attention_paged" and not subject.target.interpreted else (4,)
    for page_size in sizes:
        more: dict[str, Any] = {"page_size": page_size, "kv_heads": 2, "is_causal": subject.has("is_causal")}
        yield _made(subject, "neighbours", _pairs(subject, (3, 5), (4, 33), (2, 20), sq=2), **more)
        yield _made(subject, "full pages", _pairs(subject, (3, 16), (2, 32), sq=3), **more)
        yield _made(subject, "empty neighbour", _pairs(subject, (3, 7), (0, 0), (2, 9), sq=2), **more)


def empty(subject: Subject) -> Iterator[Input]:
    """P3: sequences without a key, without a query, and whose first queries come before their keys."""
    yield _made(subject, "no keys", _pairs(subject, (2, 0), (3, 5), sq=2))
    yield _made(subject, "no keys", _pairs(subject, (1, 0), (1, 0)))
    yield _made(subject, "first of them", _pairs(subject, (0, 0), (0, 4), (3, 3), (0, 0), sq=3))
    if subject.has("is_causal"):
        yield _made(subject, "more queries than keys", _pairs(subject, (5, 2), (3, 9), sq=5), is_causal=True)
    for row, extras in alone(subject, "packed", names=COUNTED_ONCE):
        yield _made(subject, f"no keys but a {row.fact}", _pairs(subject, (2, 0), (3, 5), sq=2), extras=extras)


def shapes(subject: Subject) -> Iterator[Input]:
    """P18: lengths at borders of tiles and of pages, 0 and 1; page sizes; heads and widths."""
    causal = subject.has("is_causal")
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        yield _made(subject, "length", _pairs(subject, (1, n), (n, n), (2, n + 1), sq=1), is_causal=causal)
    yield _made(subject, "one token", _pairs(subject, (1, 1)))
    yield _made(subject, "many", _pairs(subject, *((1 + i % 3, i) for i in range(12)), sq=2), is_causal=causal)
    if subject.op == PAGED:
        for page_size in (1, 2, 8, 16, 32, 64, 128):
            for keys in (page_size - 1, page_size, page_size + 1, 2 * page_size):
                yield _made(subject, "page", [(1, keys), (1, 3)], page_size=page_size, recipe=Recipe(seed=keys))
        yield _made(subject, "queries", [(17, 40), (17, 18)], is_causal=causal)
    for kv_heads, group, dims, value_dims in ((1, 4, 8, 8), (2, 3, 40, 40), (3, 1, 64, 64), (1, 1, 32, 16)):
        pairs = _pairs(subject, (3, 19), (1, 7), sq=2)
        yield _made(subject, "heads", pairs, kv_heads=kv_heads, group=group, dims=dims, value_dims=value_dims)


def steps(subject: Subject) -> Iterator[Input]:
    """P10: the last queries of sequences that end in their pages and at a border, of one that they make up wholly."""
    for page_size in (4, 16):
        pairs = [(5, 5), (5, 16), (5, 33)]
        yield _made(subject, "decode", pairs, page_size=page_size, kv_heads=2, is_causal=True)
        for row, extras in alone(subject, "packed steps"):
            yield _made(subject, row.fact, pairs, page_size=page_size, is_causal=True, extras=extras)


def parts(subject: Subject) -> Iterator[Input]:
    """P7: sequences of one key, of some and of many, whose parts hold nothing, or end where they do; a sink."""
    pairs = _pairs(subject, (3, 20), (1, 33), (2, 1), (2, 0), sq=2)
    for kind, size in (("plain", 0.0), ("ascending", 30.0)):
        yield _made(subject, kind, pairs, page_size=4, kv_heads=2, logits=Logits(kind, size))
    if subject.has("is_causal"):
        yield _made(subject, "causal", _pairs(subject, (3, 20), (1, 33), sq=2), page_size=4, is_causal=True)
    for row, extras in alone(subject, "packed", names=COUNTED_ONCE):
        yield _made(subject, row.fact, pairs, page_size=4, extras=extras)


def heads(subject: Subject) -> Iterator[Input]:
    """P13: heads in groups of two and of three, with a slope and a sink each."""
    pairs, causal = _pairs(subject, (3, 19), (1, 7), sq=2), subject.has("is_causal")
    yield _made(subject, "heads", pairs, page_size=4, kv_heads=2, group=3, is_causal=causal)
    extras = together("packed", names=[name for name in NAMES if "Hq" in ROWS[name].dims])
    if held(subject, tuple(extras)):
        yield _made(subject, "parameters", pairs, page_size=4, kv_heads=2, group=2, extras=extras)


def model(subject: Subject) -> Iterator[Input]:
    """G3: a long sequence beside a shorter one, plain and with a needle; 512 LSE values where calls are compiled."""
    interpreted = subject.target.interpreted
    longest, sq = (128, 16) if interpreted else (min(subject.profile.large, 1024), 64)
    for dims, kind in ((80, "plain"), (64, "needle")):
        size = float(np.log(longest)) if kind == "needle" else 0.0
        pairs = [(sq, longest), (sq, longest // 4 + 3)]
        more: dict[str, Any] = {"kv_heads": 2 if interpreted else 4, "logits": Logits(kind, size)}
        yield layout_input(subject, pairs, dims=dims, recipe=Recipe(seed=dims), features={"sweep": "model"}, **more)


def ranges(subject: Subject) -> Iterator[Input]:
    """P9: scores far from 0 in sequences whose neighbours have others."""
    for kind, size in (("offset", 1e3), ("offset", -1e3), ("peak", 3e4), ("ascending", 300.0)):
        pairs = _pairs(subject, (3, 40), (1, 70), (2, 9), sq=2)
        yield _made(subject, kind, pairs, logits=Logits(kind, size), dims=32, is_causal=subject.has("is_causal"))


def options(subject: Subject) -> Iterator[Input]:
    """P17: every option at values far from its default, those of single sequences included."""
    pairs = _pairs(subject, (9, 21), (1, 17), (5, 5), sq=4)
    common: dict[str, Any] = {"kv_heads": 2, "dims": 32}
    if subject.has("scale"):
        yield _made(subject, "scale", pairs, scale=1.0, **common)
    if subject.has("is_causal"):
        yield _made(subject, "is_causal", pairs, is_causal=True, **common)
    for row, extras in alone(subject, "packed"):
        yield _made(subject, row.name, pairs, extras=extras, **common)


def sums(subject: Subject) -> Iterator[Input]:
    """P8: the LSE of sequences of unlike lengths, of more heads than tokens and of as many."""
    yield _made(subject, "lengths", _pairs(subject, (3, 33), (1, 1), (2, 64), sq=2), kv_heads=2)
    yield _made(subject, "heads", _pairs(subject, (1, 5), (1, 9)), kv_heads=2, group=1)
    yield _made(subject, "equal", _pairs(subject, (1, 40), (1, 7)), recipe=Recipe("zeros"), kv_heads=3)
    for row, extras in alone(subject, "packed sums"):
        yield _made(subject, row.fact, _pairs(subject, (3, 33), (1, 2), sq=2), kv_heads=2, extras=extras)
