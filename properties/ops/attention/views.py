"""P12 and P20 of attention: how its inputs lie in memory does not matter, and may be larger than 32 bits count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from oracle.case import Case
from oracle.formats import StoredArray
from properties.checks import views
from properties.checks.invariance import equal_bits
from properties.checks.metamorphic import Outputs, agree, observe
from properties.checks.views import View, viewed_call
from properties.inputs import strategies
from properties.inputs.recipes import Mask
from properties.judge.pipeline import structure
from properties.judge.verdict import Basis, Judgement, Verdict, worst_of
from properties.ops.attention.options import alone
from properties.subject import Input, Subject

LAYOUTS = (
    View("heads behind positions in memory", views.swapped(1, 2)),
    View("the middle of wider rows", views.widened),
    View("every other position", views.every_other(2)),
    View("memory from its second element on", views.offset),
    View("features before positions in memory", views.swapped(2, 3)),
    View("one sequence for all", views.expanded(0)),
    View("one head for all", views.expanded(1)),
)
FAR = (
    View("keys far apart", views.far_apart(2), frozenset({"k"})),
    View("values far apart", views.far_apart(2), frozenset({"v"})),
    View("queries far apart", views.far_apart(2), frozenset({"q"})),
)
_TOKENS, _CACHES = frozenset({"q", "k", "v"}), frozenset({"k_cache", "v_cache"})
PACKED = (
    View("heads first in memory", views.swapped(0, 1), _TOKENS),
    View("the middle of wider rows", views.widened, _TOKENS),
    View("every other token", views.every_other(0), _TOKENS),
    View("memory from its second element on", views.offset, _TOKENS),
)
PAGES = (
    View("heads before places in memory", views.swapped(1, 2), _CACHES),
    View("the middle of wider rows", views.widened, _CACHES),
    View("every other page", views.every_other(0), _CACHES),
    View("memory from its second element on", views.offset, _CACHES),
    View("queries with heads behind positions in memory", views.swapped(1, 2), frozenset({"q"})),
)


def through(subject: Subject, example: Input, *, ways: tuple[View, ...]) -> Judgement:
    """P12, P20: views give the bits of contiguous copies; where they do not, what the contract allows. A refusal is
    none."""
    case = example.case
    before = observe(subject, case)
    judged = [_same(subject, case, before, view) for view in ways]
    told = [j for j in judged if j.verdict is not Verdict.UNSUPPORTED]
    if not told:
        return judged[0]
    gravest, refused = worst_of(told), [j.detail for j in judged if j.verdict is Verdict.UNSUPPORTED]
    return replace(gravest, detail="; ".join([gravest.detail, *refused]))


def _same(subject: Subject, case: Case, before: Outputs, view: View) -> Judgement:
    seen = viewed_call(subject, case, view)
    if seen.fault is not None and seen.fault[0] == "raised":
        return Judgement(Verdict.UNSUPPORTED, Basis.EXACT, f"{view.what}: refused: {seen.fault[1]}")
    wrong = structure(subject, case, seen)
    if wrong is not None:
        return wrong
    bits = equal_bits(before, seen.outputs, what=view.what)
    if bits.verdict is Verdict.PASS:
        return bits
    # A library may multiply transposed matrices in another order.
    return agree(subject, case, before, case, seen.outputs, what=view.what)


def layout_edges(subject: Subject) -> Iterator[Input]:
    """Several sequences and heads, lengths that fill their tiles and that do not; masks and slopes that differ.

    Sequences and heads that are all alike, for strides of 0.
    """
    for sq, sk in ((3, 37), (32, 64)):
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, group=1, sq=sq, sk=sk, features={"edge": "views"}
        )
    if not strategies.refuses(subject, "grouped_heads"):
        yield strategies.attention_input(subject, batch=2, kv_heads=2, group=2, sq=5, sk=33, features={"edge": "views"})
    for over in ("heads", "rows") if subject.has("attn_mask") else ():
        mask = Mask("bool", "some", over)
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, sq=3, sk=20, mask=mask, features={"edge": "mask"}
        )
    for _, extras in alone(subject, "sequences"):
        yield strategies.attention_input(
            subject, batch=2, kv_heads=2, sq=3, sk=20, extras=extras, features={"edge": "slopes"}
        )
    for axis, edge in ((0, "sequences alike"), (1, "heads alike")):
        example = strategies.attention_input(subject, batch=2, kv_heads=2, sq=3, sk=20, features={"edge": edge})
        alike = {n: _alike(a, axis) for n, a in example.case.arrays.items() if n != "q"}
        yield Input(example.case.with_arrays(**alike), example.features)


def _alike(array: StoredArray, axis: int) -> StoredArray:
    return np.ascontiguousarray(np.broadcast_to(array.take([0], axis=axis), array.shape))


def far_edges(subject: Subject) -> Iterator[Input]:
    """Three positions, 2^30 elements apart."""
    yield strategies.attention_input(subject, sq=3, sk=3, dims=16, features={"edge": "far apart"})
