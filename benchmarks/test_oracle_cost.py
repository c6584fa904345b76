"""The oracle's engines on whole heads: what a proven enclosure costs over one evaluation without any proof.

Processor time, all threads together: it hardly feels what else the machine is doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle.arithmetic.arb import arb_arithmetic
from oracle.arithmetic.mp import mp_arithmetic
from oracle.block import Block
from oracle.bounds.attention.output import bounds
from oracle.bounds.table import at_once, bounds_of
from oracle.case import Case
from oracle.evaluate import enclose
from oracle.formats import FORMATS, Float64Array
from oracle.ops.attention.case import model
from oracle.ops.contracts import preset_forms

pytestmark = pytest.mark.benchmark(timer=time.process_time)

Timed = Callable[..., Any]
FORMATS_OF_OUTPUTS = {"out": FORMATS["fp32"], "lse": FORMATS["fp32"]}


def head(rows: int, keys: int, dim: int) -> Case:
    rng = np.random.default_rng(rows + keys + dim)
    shapes = {"q": (1, 1, rows, dim), "k": (1, 1, keys, dim), "v": (1, 1, keys, dim)}
    return Case("attention", {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()})


def plain(case: Case) -> Float64Array:
    """softmax(q k^T / sqrt d) v as anyone writes it in numpy, inputs widened to float64 first."""
    q, k, v = (case.arrays[n][0, 0].astype(np.float64) for n in ("q", "k", "v"))
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights @ v / weights.sum(axis=1, keepdims=True))


def gradients(case: Case) -> tuple[Float64Array, Float64Array, Float64Array]:
    """dq, dk, dv as anyone writes them in numpy, from inputs widened to float64."""
    q, k, v, do = (case.arrays[n][0, 0].astype(np.float64) for n in ("q", "k", "v", "do"))
    scale = 1 / np.sqrt(q.shape[1])
    scores = q @ k.T * scale
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p = p / p.sum(axis=1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return ds @ k * scale, ds.T @ q * scale, p.T @ do


@pytest.fixture(scope="module")
def backward() -> Case:
    forward = head(256, 256, 64)
    do = np.random.default_rng(1).standard_normal((1, 1, 256, 64)).astype(np.float32)
    return Case("attention_backward", {**forward.arrays, "do": do})


@pytest.fixture(scope="module")
def square() -> Case:
    return head(1024, 1024, 64)


@pytest.fixture(scope="module")
def square_block(square: Case) -> Block:
    return enclose(square)[0]


@pytest.fixture(scope="module")
def long() -> Case:
    return head(64, 65536, 128)


BACKWARD = "gradients of a head of 256 x 256, d 64"
SQUARE, LONG, SMALL = "head of 1024 x 1024, d 64", "64 rows against 65536 keys, d 128", "head of 8 x 64, d 32"


def test_gradients_plain(backward: Case, timed: Timed) -> None:
    timed("gradients plain", BACKWARD, lambda: gradients(backward), rounds=15)


def test_gradients_enclosure(backward: Case, timed: Timed) -> None:
    # A case of its own each time: what was made of one is kept for a while.
    blocks = timed("gradients enclosure", BACKWARD, lambda: enclose(replace(backward)), rounds=15)
    for name, plainly in zip(("dq", "dk", "dv"), gradients(backward), strict=True):
        part = next(b for b in blocks if b.holds(name)).part(name)
        assert part.rad.max() < 1e-11
        assert (np.abs(part.hi - plainly) < 1e-11).all()


def test_gradients_enclosed_and_bounded(backward: Case, timed: Timed) -> None:
    forms, bounded = preset_forms("attention_backward", "flash"), bounds_of("attention_backward")

    def all_of_it() -> list[Any]:
        case = replace(backward)
        return [bounded(case, block, forms, {}) for block in enclose(case)]

    found = timed("gradients enclosure, bounds of seven forms", BACKWARD, all_of_it, rounds=15)
    assert all(len(of_block) == len(forms) for of_block in found)


def test_square_plain(square: Case, timed: Timed) -> None:
    timed("square plain", SQUARE, lambda: plain(square), rounds=15)


def test_square_enclosure(square: Case, timed: Timed) -> None:
    block = timed("square enclosure", SQUARE, lambda: enclose(square)[0], rounds=15)
    assert block.part("out").rad.max() < 1e-11
    assert (np.abs(block.part("out").hi - plain(square)) < 1e-11).all()


def test_square_bound(square: Case, square_block: Block, timed: Timed) -> None:
    forms = preset_forms("attention", "fp32")[:1]
    found = timed("square bound", SQUARE, lambda: bounds(square, square_block, forms, FORMATS_OF_OUTPUTS))
    assert np.isfinite(found[0]["out"].bound).all()


def test_square_bounds_of_all_forms(square: Case, square_block: Block, timed: Timed) -> None:
    forms = preset_forms("attention", "flash")
    timed(
        "square bounds, five forms", SQUARE, lambda: bounds(square, square_block, forms, FORMATS_OF_OUTPUTS), rounds=7
    )


def test_square_model(square: Case, square_block: Block, timed: Timed) -> None:
    form = preset_forms("attention", "fp32")[0]
    timed("square model", SQUARE, lambda: model(square, (0, 0), square_block.rows, form))


def test_square_mpmath(square: Case, timed: Timed) -> None:
    rows = np.arange(0, 1024, 64)
    timed("square mpmath, 16 rows", SQUARE, lambda: enclose(square, rows=rows, ar=mp_arithmetic(113)), rounds=1)


def test_square_arb(square: Case, timed: Timed) -> None:
    rows = np.arange(0, 1024, 64)
    timed("square arb, 16 rows", SQUARE, lambda: enclose(square, rows=rows, ar=arb_arithmetic(128)), rounds=1)


def test_long_plain(long: Case, timed: Timed) -> None:
    timed("long plain", LONG, lambda: plain(long))


def test_long_enclosure(long: Case, timed: Timed) -> None:
    block = timed("long enclosure", LONG, lambda: enclose(long)[0])
    assert block.part("out").rad.max() < 1e-9


def test_long_bounds_of_all_forms(long: Case, timed: Timed) -> None:
    block, forms = enclose(long)[0], preset_forms("attention", "flash")
    timed("long bounds, five forms", LONG, lambda: bounds(long, block, forms, FORMATS_OF_OUTPUTS), rounds=3)


def test_long_model(long: Case, timed: Timed) -> None:
    form = preset_forms("attention", "flash")[0]
    timed("long model", LONG, lambda: model(long, (0, 0), np.arange(64), form), rounds=3)


def test_small_enclosure(timed: Timed) -> None:
    case = head(8, 64, 32)
    timed("small enclosure", SMALL, lambda: enclose(case)[0], rounds=200)


def test_small_bounds(timed: Timed) -> None:
    case = head(8, 64, 32)
    block = enclose(case)[0]
    forms = preset_forms("attention", "fp32")
    timed("small bounds, three forms", SMALL, lambda: bounds(case, block, forms, FORMATS_OF_OUTPUTS), rounds=100)


def test_tiny_case_of_all_forms(timed: Timed) -> None:
    rng, narrow = np.random.default_rng(0), FORMATS["bf16"]
    shapes = {"q": (1, 4, 3, 16), "k": (1, 4, 37, 16), "v": (1, 4, 37, 16)}
    case = Case("attention", {n: narrow.store(rng.standard_normal(s)) for n, s in shapes.items()})
    forms = preset_forms("attention", "flash")

    def all_of_it() -> None:
        blocks = enclose(case)
        for whole, _ in at_once(case.op, blocks):
            bounds(case, whole, forms, {})
        for block in blocks:
            model(case, block.key, block.rows, forms[0])

    timed("tiny enclosure, bounds of five forms, model", "4 heads of 3 x 37, d 16, in bf16", all_of_it, rounds=30)
