"""Heads that are evaluated at once come out as they do alone: to the last bit, but for radii of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle import block as block_module
from oracle import evaluate
from oracle.block import Block
from oracle.bounds.table import at_once, bounds_of, of_head
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS, Format
from oracle.ops.contracts import preset_forms
from oracle.ops.table import op_named


def drawn(rng: np.random.Generator, fmt: Format, *shape: int) -> Any:
    """Numbers of which some head's may be all zero, huge or broken."""
    a = rng.standard_normal(shape) * float(rng.choice([1.0, 1.0, 1e3, 1e-5]))
    head = int(rng.integers(shape[1]))
    a[:, head] *= float(rng.choice([1.0, 1.0, 1.0, 0.0, 1e4, 2.0**90]))
    if rng.random() < 0.15:
        a.flat[int(rng.integers(a.size))] = rng.choice([np.nan, np.inf, -np.inf])
    return fmt.store(a)


def options(rng: np.random.Generator, fmt: Format, batch: int, heads: int, sq: int, sk: int) -> dict[str, Any]:
    sinks = rng.standard_normal(heads)
    sinks[int(rng.integers(heads))] = rng.choice([0.5, -np.inf, np.inf, np.nan])
    hidden = np.where(rng.random((1, heads, sq, sk)) < 0.2, -np.inf, rng.standard_normal((1, heads, sq, sk)))
    known = {
        "is_causal": True,
        "softcap": 3.0,
        "window_size": (3, 1),
        "alibi_slopes": fmt.store(rng.uniform(0, 1, (batch, heads))),
        "sinks": fmt.store(sinks),
        "attn_mask": fmt.store(hidden) if rng.random() < 0.5 else rng.random((sq, sk)) < 0.7,
        "lse_sink": "excluded",
        "causal_alignment": "bottom_right",
    }
    return {name: value for name, value in known.items() if rng.random() < 0.3}


def cases(count: int) -> list[Case]:
    rng, found = np.random.default_rng(11), []
    for _ in range(count):
        fmt = FORMATS[str(rng.choice(["fp64", "fp32", "fp16", "bf16"]))]
        batch, shared, group, sq, sk, d, dv = (int(rng.integers(1, top)) for top in (4, 4, 4, 9, 40, 20, 20))
        shapes = {"q": (batch, shared * group, sq, d), "k": (batch, shared, sk, d), "v": (batch, shared, sk, dv)}
        with np.errstate(all="ignore"):
            arrays = {name: drawn(rng, fmt, *shape) for name, shape in shapes.items()}
        found.append(Case("attention", arrays, options(rng, fmt, batch, shared * group, sq, sk)))
    return found


def packed(case: Case) -> Case:
    """The heads of two sequences, packed one behind the other."""
    q, k, v = (case.arrays[name][0].transpose(1, 0, 2) for name in "qkv")
    ends = {"cu_seqlens_q": [0, len(q) // 2, len(q)], "cu_seqlens_k": [0, len(k) // 3, len(k)]}
    known = {n: v for n, v in case.options.items() if n not in ("attn_mask", "alibi_slopes")}
    arrays = {"q": q, "k": k, "v": v, **{n: np.array(e, dtype=np.int32) for n, e in ends.items()}}
    return Case("attention_varlen", arrays, known)


def alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    with monkeypatch.context() as patch:
        patch.setattr(block_module, "CACHED", 0)
        return enclose(case)


def differentiated(case: Case) -> Case:
    """The gradients of a case."""
    rng, (q, v) = np.random.default_rng(5), (case.arrays["q"], case.arrays["v"])
    do = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    return Case("attention_backward", {**case.arrays, "do": do}, case.options)


LAYOUTS = {"dense": lambda case: case, "packed": packed, "gradients": differentiated}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_enclosures_of_a_stack_are_those_of_its_heads(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = 0
    for case in cases(60):
        asked = LAYOUTS[layout](case)
        blocks, single = enclose(asked), alone(replace(asked), monkeypatch)
        together += any(block.stack is not None for block in blocks)
        assert not any(block.stack is not None for block in single)
        for one, other in zip(blocks, single, strict=True):
            assert (one.key, one.index, one.places) == (other.key, other.index, other.places)
            for name in ("rows", "empty", "undefined", "visible"):
                kept, wanted = getattr(one, name), getattr(other, name)
                assert kept is wanted is None or np.array_equal(kept, wanted), name
            assert list(one.values) == list(other.values)
            for name in one.values:
                kept, wanted = one.part(name), other.part(name)
                assert np.array_equal(kept.hi, wanted.hi, equal_nan=True), (name, case.describe())
                if layout == "gradients":
                    # A zero in one head, such as a sum that cancels, gives all of them absolute radii, which are less.
                    assert (kept.rad <= wanted.rad).all(), (name, case.describe())
                    assert (kept.rad >= wanted.rad / 2).all(), (name, case.describe())
                else:
                    assert np.array_equal(kept.rad, wanted.rad), (name, case.describe())
            name = next(iter(one.values))
            first = one.between(0, 1).part(name)
            assert np.array_equal(first.hi, other.part(name).hi[:1], equal_nan=True)
    assert together > 20


def test_models_of_a_stack_are_those_of_its_heads() -> None:
    forms = [
        form.with_fields(tile=tile, splits=splits)
        for form in preset_forms("attention", "flash")[:2]
        for tile, splits in ((None, 1), (4, 1), (None, 3))
    ]
    for case in cases(20):
        op = op_named(case.op)
        keys, rows = op.blocks(case), np.arange(case.arrays["q"].shape[2])
        if len({op.together(case, key) for key in keys} if op.together else ()) != 1:
            continue
        for form in forms:
            found = op.model(case, evaluate.as_one(keys), rows, form)
            for place, key in enumerate(keys):
                for name, wanted in op.model(case, key, rows, form).items():
                    assert np.array_equal(found[name][place], wanted, equal_nan=True), (name, form.label)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_of_a_stack_are_those_of_its_heads(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases(20):
        asked = LAYOUTS[layout](case)
        forms = preset_forms(asked.op, "flash")
        formats = {"lse": FORMATS["fp32"]} | dict.fromkeys(op_named(asked.op).outputs, FORMATS["bf16"])
        blocks, bounds = enclose(asked), bounds_of(asked.op)
        found: dict[int, Any] = {}
        for whole, places in at_once(asked.op, blocks):
            made = bounds(asked, whole, forms, formats)
            found |= {index: of_head(made, place) for index, place in places}
        with monkeypatch.context() as patch:
            patch.setattr(block_module, "CACHED", 0)
            same = replace(asked)
            single = [bounds(same, block, forms, formats) for block in enclose(same)]
        for index, by_form in enumerate(single):
            for one, other, form in zip(found[index], by_form, forms, strict=True):
                for name in one:
                    kept, wanted = one[name].bound, other[name].bound
                    # Radii of gradients may differ, and with them a bound that is hardly larger.
                    close = np.allclose(kept, wanted, rtol=1e-8, atol=1e-250, equal_nan=True)
                    assert close if layout == "gradients" else np.array_equal(kept, wanted, equal_nan=True), form.label
                    assert np.array_equal(one[name].may_overflow, other[name].may_overflow), (name, form.label)
