"""Every row of the tables of whole blocks, and of mla's gradients, can fail, and passes for an honest kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from torch import Tensor

from properties.judge.verdict import Verdict
from properties.ops.blocks import gqa as gqa_block
from properties.ops.blocks import mla as mla_block
from properties.ops.gradients import mla as mla_backward
from properties.property import Property
from properties.search import hunt
from properties.subject import PROFILES, Subject, subject_for
from targets.calling.registry import resolve
from targets.calling.target import Target, target_from
from targets.honest.gqa_block import gqa_block as honest_gqa
from targets.honest.mla_backward import mla_backward as honest_gradients
from targets.honest.mla_block import mla_block as honest_mla
from targets.mutants.table import mutant_named

PROFILE = replace(PROFILES["quick"], examples=3, shrink_seconds=0.0)
TABLES: dict[str, tuple[Property, ...]] = {
    "gqa_block": gqa_block.PROPERTIES,
    "mla_block": mla_block.PROPERTIES,
    "mla_backward": mla_backward.PROPERTIES,
}
HONEST: dict[str, Callable[..., Any]] = {
    "gqa_block": honest_gqa,
    "mla_block": honest_mla,
    "mla_backward": honest_gradients,
}
ROWS = [pytest.param(op, row, id=f"{op}-{row.id}") for op, table in TABLES.items() for row in table]


def changed(op: str, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor, Tensor], Tensor]) -> Target:
    """The honest block with x changed before it, or its output (given with x) after it."""
    honest = resolve(f"targets.honest.{op}:{op}")
    function = honest.function

    def broken(**given: Any) -> Tensor:
        return leave(function(**{**given, "x": enter(given["x"])}), given["x"])

    return replace(honest, name="broken", function=broken)


def same(x: Tensor) -> Tensor:
    return x


def without_last_channel(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., -1] = 0
    return x


def in_place(out: Tensor, x: Tensor) -> Tensor:
    x.mul_(0.5)
    return out


def wrong_gradients(id: str) -> Target:
    honest = resolve("targets.honest.mla_backward:mla_backward")
    function = honest.function

    def broken(**given: Any) -> Any:
        found = function(**given)
        match id:
            case "P15":
                given["do"].mul_(0.5)
            case "P23":
                found = tuple(g.double() for g in found)
            case "P25":
                found = tuple(g + 0.125 for g in found)
            case _:
                found = (*found[:5], found[5] * 1.25)
        return found

    return replace(honest, name="broken", function=broken)


def wrong(op: str, id: str) -> Target:
    if op == "mla_backward":
        return wrong_gradients(id)
    match id:
        case "P4":
            return (
                resolve(mutant_named("gqa_block_sees_the_future").target)
                if op == "gqa_block"
                else changed(op, same, lambda out, x: out + 0.125 * x.sum())
            )
        case "P10":
            return changed(op, same, lambda out, x: out * (1 + 0.25 * x.shape[1]))
        case "P13":
            return resolve(mutant_named("gqa_block_kv_heads_tiled").target)
        case "P15":
            return changed(op, same, in_place)
        case "P16":
            return resolve(mutant_named("mla_block_positions_ignored").target)
        case "P17":
            return resolve(mutant_named("mla_block_eps_outside_the_root").target)
        case "P21":
            return resolve(mutant_named("mla_block_mscale_once").target)
        case "P23":
            return changed(op, same, lambda out, x: out.double())
        case "P25":
            return changed(op, without_last_channel, lambda out, x: out)
    return changed(op, same, lambda out, x: out * 1.25)


def shortened(row: Property) -> Property:
    """The row with a few of its edge inputs."""
    return replace(row, edges=lambda subject: list(islice(row.edges(subject), 3)))


def subject_of(target: Target) -> Subject:
    return subject_for(target, "fp32", profile=PROFILE)


@pytest.mark.parametrize(("op", "row"), ROWS)
def test_a_wrong_block_fails(op: str, row: Property) -> None:
    found = hunt(subject_of(wrong(op, row.id)), shortened(row), seed=1)
    if Verdict.FAIL not in {record.verdict for record in found}:
        found = hunt(subject_of(wrong(op, row.id)), replace(row, search=None), seed=1)
    assert Verdict.FAIL in {record.verdict for record in found}


@pytest.mark.parametrize(("op", "row"), ROWS)
def test_an_honest_block_lives(op: str, row: Property) -> None:
    target = target_from(HONEST[op], spec=f"targets.honest.{op}:{op}")
    found = [record.verdict for record in hunt(subject_of(target), shortened(row), seed=2)]
    assert set(found) <= {Verdict.PASS, Verdict.VACUOUS, Verdict.EXEMPT}
    assert Verdict.PASS in found
