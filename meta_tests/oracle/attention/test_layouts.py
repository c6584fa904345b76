"""Packed and paged attention: each sequence is the dense case that it says it is, and what cannot be is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle.bounds.table import bounds_of
from oracle.case import Case, load_case, save_case
from oracle.evaluate import enclose, refine
from oracle.formats import FORMATS
from oracle.ops.contracts import preset_forms
from oracle.ops.layouts.case import PAGED, VARLEN, dense
from oracle.ops.table import op_named
from properties.subject import PROFILES, subject_for
from targets.calling.target import target_from

Array = np.ndarray[Any, Any]
LENGTHS = ((2, 5), (0, 3), (3, 0), (1, 4))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"window_size": (2, 1), "causal_alignment": "bottom_right", "sinks": np.array([1.0, -1.0], dtype=np.float32)},
    {"softcap": 2.0, "alibi_slopes": np.linspace(0.1, 1, 8, dtype=np.float32).reshape(4, 2), "scale": 0.5},
]


def packed(**options: Any) -> Case:
    rng = np.random.default_rng(1)
    tokens = {"q": (sum(a for a, _ in LENGTHS), 2, 4), "k": (12, 1, 4), "v": (12, 1, 3)}
    arrays: dict[str, Array] = {n: rng.standard_normal(s).astype(np.float32) for n, s in tokens.items()}
    for i, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        arrays[name] = np.cumsum([0, *(pair[i] for pair in LENGTHS)]).astype(np.int32)
    return Case(VARLEN, arrays, options)


def paged(**options: Any) -> Case:
    rng = np.random.default_rng(2)
    arrays: dict[str, Array] = {
        "q": rng.standard_normal((4, 2, 2, 4)).astype(np.float32),
        "k_cache": rng.standard_normal((7, 2, 1, 4)).astype(np.float32),
        "v_cache": rng.standard_normal((7, 2, 1, 3)).astype(np.float32),
        "block_table": np.array([[6, 0, 3], [2, 9, -5], [4, 4, 4], [5, 1, 0]], dtype=np.int32),
        "cache_seqlens": np.array([5, 2, 0, 4], dtype=np.int32),
    }
    return Case(PAGED, arrays, options)


def by_hand(case: Case, n: int) -> tuple[Array, Array, Array]:
    """q [Sq, Hq, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv] of one sequence, token by token."""
    a = case.arrays
    if case.op == VARLEN:
        rows = range(a["cu_seqlens_q"][n], a["cu_seqlens_q"][n + 1])
        keys = range(a["cu_seqlens_k"][n], a["cu_seqlens_k"][n + 1])
        return a["q"][list(rows)], a["k"][list(keys)], a["v"][list(keys)]
    places = [(a["block_table"][n, j // 2], j % 2) for j in range(a["cache_seqlens"][n])]
    k, v = (
        np.array([cache[p] for p in places]).reshape(-1, 1, cache.shape[3]) for cache in (a["k_cache"], a["v_cache"])
    )
    return a["q"][n].transpose(1, 0, 2), k, v


@pytest.mark.parametrize("make", [packed, paged])
@pytest.mark.parametrize("options", OPTIONS)
def test_each_sequence_is_a_dense_case(make: Any, options: dict[str, Any]) -> None:
    case = make(**options)
    op = op_named(case.op)
    shapes = op.output_shapes(case)
    held = {name: np.zeros(shape) for name, shape in shapes.items()}
    forms = preset_forms(case.op, "fp32")
    for block in enclose(case):
        n, h = block.key
        q, k, v = by_hand(case, n)
        given = {key: value for key, value in options.items() if key != "alibi_slopes"}
        if "alibi_slopes" in options:
            given["alibi_slopes"] = options["alibi_slopes"][n]
        if case.op == PAGED:
            given["causal_alignment"] = "bottom_right"
        for name in ("out", "lse"):
            block.whole(name, held[name])[block.rows] += 1
        if not len(k):
            assert block.empty.all()
            continue
        alone = Case("attention", {x: a.transpose(1, 0, 2)[None] for x, a in (("q", q), ("k", k), ("v", v))}, given)
        same = next(b for b in enclose(alone) if b.key == (0, h))
        for name in ("out", "lse"):
            assert np.array_equal(block.part(name).hi[~block.empty], same.part(name).hi[~same.empty])
        formats = {"out": FORMATS["fp32"], "lse": FORMATS["fp32"]}
        here, there = (bounds_of(c.op)(c, b, forms, formats) for c, b in ((case, block), (alone, same)))
        for one, other in zip(here, there, strict=True):
            live = ~block.empty
            assert np.array_equal(one["out"].bound[live], other["out"].bound[live])
    # Every row of the outputs belongs to one block.
    assert all((count == 1).all() for count in held.values())


def test_a_packed_lse_has_its_heads_first() -> None:
    case = packed()
    assert op_named(VARLEN).output_shapes(case) == {"out": (6, 2, 3), "lse": (2, 6)}
    block = next(b for b in enclose(case) if b.key == (3, 1))
    lse, out = np.arange(12).reshape(2, 6), np.arange(36).reshape(6, 2, 3)
    assert block.take("lse", lse).tolist() == [[11]]
    assert np.array_equal(block.take("out", out), out[5:6, 1])
    fine = refine(case, block, np.array([True]), 128)
    assert np.array_equal(fine.take("lse", lse), block.take("lse", lse))


@pytest.mark.parametrize("make", [packed, paged])
def test_a_case_survives_its_file(make: Any, tmp_path: Any) -> None:
    case = make(**OPTIONS[3])
    assert load_case(save_case(case, tmp_path / "case")[1]).digest() == case.digest()


def i32(*values: Any) -> Array:
    return np.array(values, dtype=np.int32)


WRONG: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (packed, {"cu_seqlens_q": i32(1, 2, 2, 5, 6)}, {}, r"cu_seqlens_q must start at 0, got \[1,"),
    (packed, {"cu_seqlens_k": i32(0, 5, 3, 8, 12)}, {}, r"cu_seqlens_k must not descend, got \[0, 5, 3"),
    (packed, {"cu_seqlens_k": i32(0, 5, 8, 8, 11)}, {}, r"cu_seqlens_k must end at the 12 tokens .* 11\]"),
    (packed, {"cu_seqlens_k": i32(0, 5, 12)}, {}, "hold 4 and 2 sequences"),
    (packed, {"cu_seqlens_k": np.array([0.0, 12.0])}, {}, "cu_seqlens_k must be 1-dimensional of integers"),
    (packed, {"cu_seqlens_q": i32()}, {}, r"cu_seqlens_q must start at 0, got \[\]"),
    (packed, {"v": np.zeros((11, 1, 3), dtype=np.float32)}, {}, "k and v differ in their number of tokens: 12 and 11"),
    (packed, {"q": np.zeros((6, 2, 5), dtype=np.float32)}, {}, "q and k differ in head dimension: 5 and 4"),
    (packed, {}, {"attn_mask": np.ones((6, 12), dtype=bool)}, "attention_varlen takes no attn_mask"),
    (packed, {}, {"alibi_slopes": np.ones((3, 2))}, r"alibi_slopes must be an array \[2\] or \[4, 2\]"),
    (packed, {}, {"window": (1, 1)}, "unknown option 'window'"),
    (
        paged,
        {"block_table": i32([6, 7, 3], [2, 0, 0], [4, 4, 4], [5, 1, 0])},
        {},
        r"block_table of sequence 0 .* \[6, 7",
    ),
    (paged, {"block_table": i32([6, 0, 3], [-1, 0, 0], [4, 4, 4], [5, 1, 0])}, {}, "block_table of sequence 1"),
    (paged, {"cache_seqlens": i32(5, 7, 0, 4)}, {}, r"cache_seqlens must lie .* 6 positions, got \[5, 7"),
    (paged, {"cache_seqlens": i32(5, -1, 0, 4)}, {}, r"cache_seqlens must lie .* got \[5, -1"),
    (paged, {"cache_seqlens": i32(5, 2, 0)}, {}, "cache_seqlens holds 3 sequences, q 4"),
    (paged, {"v_cache": np.zeros((7, 3, 1, 3), dtype=np.float32)}, {}, r"hold pages \[7, 2\] and \[7, 3\]"),
    (paged, {}, {"causal_alignment": "top_left"}, "causal_alignment 'top_left'"),
    (paged, {}, {"sinks": np.zeros(3)}, r"sinks must be an array \[Hq\] = \[2\]"),
]


@pytest.mark.parametrize(("make", "arrays", "options", "message"), WRONG)
def test_what_cannot_be_is_refused_before_a_target_is_called(
    make: Any, arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    def packed_kernel(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        raise AssertionError("called")

    def paged_kernel(q: Any, k_cache: Any, v_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
        raise AssertionError("called")

    case = make(**options).with_arrays(**arrays)
    with pytest.raises(ValueError, match=message):
        enclose(case)
    target = target_from(packed_kernel if make is packed else paged_kernel, spec="f")
    subject = subject_for(target, "fp32", profile=PROFILES["quick"])
    with pytest.raises(ValueError, match=message):
        subject.call(case)
    assert subject.call(make()).fault is not None


def test_a_sequence_without_keys_is_a_dense_case_that_nobody_sees() -> None:
    bare = dense(packed(), 2)
    assert bare.arrays["k"].shape == (1, 1, 1, 4)
    assert not bare.options["attn_mask"].any()


def test_lengths_of_the_longest_are_handed_over_where_asked_for() -> None:
    seen: dict[str, int] = {}

    def kernel(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int
    ) -> Any:
        seen.update(q=max_seqlen_q, k=max_seqlen_k)
        return q[..., :3].clone()

    subject = subject_for(target_from(kernel, spec="f"), "fp32", profile=PROFILES["quick"])
    assert subject.call(packed()).fault is None
    assert seen == {"q": 3, "k": 5}
