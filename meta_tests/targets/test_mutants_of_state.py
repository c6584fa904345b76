"""Mutants that no single output of contiguous tensors shows: each does what it says of itself, an honest kernel not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from targets.calling.registry import resolve
from targets.honest import dropout, flash
from targets.mutants.table import mutant_named


def mutant(name: str) -> Any:
    return resolve(mutant_named(name).target).function


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_splits_follow_batch() -> None:
    q, k, v = numbers(3, 2, 1, 40, 8)
    for function, same in ((mutant("splits_follow_batch"), False), (flash.attention, True)):
        together, alone = function(q, k, v, return_lse=True), function(q[:1], k[:1], v[:1], return_lse=True)
        assert together[1][:1].equal(alone[1]) is same
        torch.testing.assert_close(together[0][:1], alone[0])


def test_strides_ignored() -> None:
    q, k, v = numbers(3, 1, 1, 2, 2)
    turned = k.mT.contiguous().mT
    assert turned.equal(k)
    function = mutant("strides_ignored")
    assert function(q, k, v).equal(flash.attention(q, k, v))
    torch.testing.assert_close(flash.attention(q, turned, v), flash.attention(q, k, v))
    assert not torch.allclose(function(q, turned, v), flash.attention(q, k, v))


def test_stride_zero_ignored() -> None:
    q, k = numbers(2, 2, 2, 1, 2)
    v = numbers(2, 1, 1, 2, seed=1).expand(2, 2, 1, 2)
    function = mutant("stride_zero_ignored")
    assert function(q, k, v.contiguous()).equal(flash.attention(q, k, v))
    assert not torch.allclose(function(q, k, v), flash.attention(q, k, v))


def test_offset_wraps() -> None:
    q, k, v = numbers(3, 1, 1, 3, 2)
    far = torch.empty(2**31 + 2).as_strided(k.shape, (1, 1, 2**30, 1)).copy_(k)
    function = mutant("offset_wraps")
    assert function(q, k, v).equal(flash.attention(q, k, v))
    torch.testing.assert_close(flash.attention(q, far, v), flash.attention(q, k, v))
    assert not torch.allclose(function(q, far, v), flash.attention(q, k, v))


HALF: dict[str, Any] = {"dropout_p": 0.5}


def one_key(rows: int = 64) -> dict[str, Tensor]:
    return {"q": torch.zeros(1, 1, rows, 1), "k": torch.zeros(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "values"),
    [("dropout_not_rescaled", {0.0, 1.0}), ("dropout_before_the_sum", {"nan", 1.0}), ("honest", {0.0, 2.0})],
)
def test_what_is_left_of_one_key(name: str, values: set[Any]) -> None:
    function = dropout.attention if name == "honest" else mutant(name)
    out = function(**one_key(), seed=1, **HALF)
    assert {"nan" if x != x else x for x in out.flatten().tolist()} == values


@pytest.mark.parametrize(("name", "active"), [("dropout_in_evaluation", True), ("honest", False)])
def test_outside_of_training(name: str, active: bool) -> None:
    function = dropout.attention if name == "honest" else mutant(name)
    assert (not function(**one_key(), training=False, seed=1, **HALF).eq(1).all()) is active


@pytest.mark.parametrize(
    ("name", "repeats", "differs"),
    [("dropout_seed_ignored", False, True), ("dropout_same_in_every_call", True, False), ("honest", True, True)],
)
def test_seeds(name: str, repeats: bool, differs: bool) -> None:
    function = dropout.attention if name == "honest" else mutant(name)
    first, again, other = (function(**one_key(), seed=seed, **HALF) for seed in (1, 1, 2))
    assert (first.equal(again), not first.equal(other)) == (repeats, differs)


def test_an_honest_call_without_a_seed_draws_afresh() -> None:
    assert not dropout.attention(**one_key(), **HALF).equal(dropout.attention(**one_key(), **HALF))
